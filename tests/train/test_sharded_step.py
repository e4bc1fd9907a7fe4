"""The compiled step on a mesh: every device computes its own rows, and gathers weights in turn."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from longspec_jax.drafters import longspec as draft_lib
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.models import target as target_lib
from longspec_jax.models.target import Target
from longspec_jax.sharding import make_mesh, param_shardings
from tests.kit import ALL_PASSES, tiny_target_config
from train import target as training_target
from train.config import OptimizerConfig
from train.drafts import longspec as passes
from train.drafts.kinds import LongSpecSettings
from train.drafts.longspec import LongSpecObjective
from train.step import ROWS, Batch, TrainState, make_optimizer, make_step, state_shardings
from train.target import TargetObjective

pytestmark = pytest.mark.full

ROWS_, TOKENS, WIDTH, MLP = 8, 26, 64, 144
CONFIG = tiny_target_config(
    vocab_size=112, model_width=WIDTH, mlp_width=MLP, num_heads=4, num_kv_heads=2, head_width=16
)
SETTINGS = LongSpecSettings("longspec", "", 5, True, 4, 4, distillation=0.5)
"""With distillation a step reads all of the target."""
ADAMW = OptimizerConfig(0.9, 0.95, 1e-6, 1.0, 0.1, False, 0.1, 1e-4)
COLLECTIVE = r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def compiled(kind: str, layers: int = 2, **axes: int) -> Any:
    """The step of two micro-batches, compiled from shapes."""
    config = dataclasses.replace(CONFIG, num_layers=layers)
    draft = DraftConfig.for_target(config, window=5)
    objectives: dict[str, Any] = {
        "draft": LongSpecObjective(config, draft, SETTINGS, 90, 1024),
        "target": TargetObjective(config, 1024),
    }
    objective, optimizer, mesh = objectives[kind], make_optimizer(ADAMW), make_mesh(**axes)

    def placed(shapes: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            *(shapes, shardings),
        )

    key, some = jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    frozen = jax.eval_shape(lambda: Target(config).init(key, some, method="initialize")["params"])
    params = jax.eval_shape(objective.initialize, key)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    shardings = state_shardings(mesh, objective, optimizer)
    state = placed(TrainState(step, params, jax.eval_shape(optimizer.init, params)), shardings)
    rows = NamedSharding(mesh, ROWS)
    batch = Batch(
        *(
            jax.ShapeDtypeStruct((2, ROWS_, TOKENS), dtype, sharding=rows)
            for dtype in (jnp.int32, jnp.float32)
        )
    )
    frozen = placed(frozen, param_shardings(mesh, frozen)) if kind == "draft" else ()
    run = make_step(objective, optimizer, 0, mesh, shardings)
    lowered = run.lower(state, frozen, batch, np.float32(0))
    # As little as possible at once, which a GPU's scheduler has in mind and a CPU's by default not.
    frugal = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return lowered.compile({**frugal, **ALL_PASSES})


def operations(text: str, kinds: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """``(computation, operation, shape)`` of every floating-point result of these operations."""
    found, computation = [], ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.split()[0]
        if match := re.search(rf" = (.*?) ({kinds})\(", line):
            for dims in re.findall(r"(?:f|bf)\d+\[([\d,]*)\]", match[1]):
                shape = tuple(int(size) for size in dims.split(",") if size)
                found.append((computation, match[2], shape))
    return found


def of_all_rows(text: str) -> list[tuple[int, ...]]:
    """Shapes of products and collectives that hold the rows of all devices."""
    shapes = [shape for _, _, shape in operations(text, f"dot|{COLLECTIVE}")]
    return [
        shape
        for shape in shapes
        if ROWS_ * TOKENS in shape or shape[:2] in ((ROWS_, TOKENS), (ROWS_ * 4, TOKENS))
    ]


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("draft", {"fsdp": 8}),
        ("draft", {"data": 8}),
        ("draft", {"data": 2, "fsdp": 2, "tp": 2}),
        ("target", {"fsdp": 8}),
    ],
)
def test_a_device_computes_its_own_rows(kind: str, axes: dict[str, int]) -> None:
    text = compiled(kind, **axes).as_text()
    assert operations(text, "dot")
    assert of_all_rows(text) == []


def test_left_to_the_compiler_every_device_computes_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: what the search above finds without a word on activations."""
    for module in (target_lib, draft_lib, training_target, passes):
        monkeypatch.setattr(module, "with_sharding", lambda terms, *arrays: arrays)
    assert of_all_rows(compiled("draft", fsdp=8).as_text())


def test_weights_are_gathered_layer_by_layer_for_every_micro_batch() -> None:
    """In the loop: gathered before it, all of them would be whole all the time."""
    step, more = compiled("draft", fsdp=8), compiled("draft", layers=4, fsdp=8)
    gathers = operations(step.as_text(), "all-gather")
    whole = [place for place, _, shape in gathers if shape == (WIDTH, 2, MLP)]
    assert len(whole) == 3 and not any("ENTRY" in place for place in whole)
    # Two more layers of the target are gathered in between, and let go.
    one, other = (each.memory_analysis().temp_size_in_bytes for each in (step, more))
    layer_bytes = 4 * (WIDTH * (4 + 2 * 2 + 4) * 16 + 3 * WIDTH * MLP)
    assert other - one < layer_bytes / 8


@pytest.mark.parametrize("axes", [{"data": 8}, {"fsdp": 8}, {"data": 4, "fsdp": 2}], ids=str)
def test_no_two_devices_hold_the_same_masters_and_moments(axes: dict[str, int]) -> None:
    """ZeRO-1 on a mesh of ``data``, where the weights that are read are whole."""
    draft = DraftConfig.for_target(CONFIG, window=5)
    objective, optimizer = (
        LongSpecObjective(CONFIG, draft, SETTINGS, 90, 1024),
        make_optimizer(ADAMW),
    )
    params = jax.eval_shape(objective.initialize, jax.random.key(0))
    state = TrainState((), params, jax.eval_shape(optimizer.init, params))
    shardings = dataclasses.replace(
        state_shardings(make_mesh(**axes), objective, optimizer), step=()
    )
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    matrices = [(leaf, where) for leaf, where in leaves if leaf.size >= WIDTH * WIDTH]
    assert len(matrices) >= 3 * 6
    for leaf, where in matrices:
        assert 8 * math.prod(where.shard_shape(leaf.shape)) == leaf.size
