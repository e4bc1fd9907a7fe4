"""Training of the parallel draft: the step of an implementation in PyTorch, meshes, chunks, labels.

The oracle computes block by block from the definition, with PyTorch's own gradients; target and
optimiser are written out here once more.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import load_file

from longspec_jax.drafters.longspec import checkpoint as longspec
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.parallel.checkpoint import save_draft
from longspec_jax.drafters.parallel.config import ParallelConfig
from longspec_jax.sharding import make_mesh, param_shardings
from tests.kit import random_draft, relative_error, tiny_target_config
from train.config import OptimizerConfig, StageConfig
from train.drafts import block_attention
from train.drafts.base import Given
from train.drafts.kinds import KINDS
from train.drafts.parallel.objective import ParallelObjective
from train.drafts.parallel.settings import ParallelSettings
from train.step import ROWS, Batch, initial_state, make_optimizer, make_step, state_shardings
from train.target import TargetObjective, run_target

STEPS, RATE, ROWS_ = 4, 1e-2, (2, 2)
TARGET = tiny_target_config(
    vocab_size=104, model_width=32, mlp_width=48, num_layers=1, num_heads=4, head_width=8
)
SETTINGS = ParallelSettings("parallel", "", 5, 2, 4, 6, 3, 2.0, True, 4, 0.9)
DRAFT = ParallelConfig(DraftConfig.for_target(TARGET, window=5), 104, 2, 4, 6)
OBJECTIVE = ParallelObjective(TARGET, DRAFT, SETTINGS, 90, 16)
STAGE = StageConfig("short", 13, 4, 2, RATE, STEPS, 0, 0.0, 90)
ADAMW = OptimizerConfig(0.9, 0.95, 1e-6, 1.0, 0.1, False, 0.1, 1e-4)
TABLES = "embedding", "head"


def batch() -> Batch:
    """Of two micro-batches of two rows of 13 tokens, a fifth of which are not to be predicted."""
    rng = np.random.default_rng(0)
    weights = (rng.random((*ROWS_, 13)) > 0.2).astype(np.float32)
    return Batch(rng.integers(0, 104, (*ROWS_, 13)).astype(np.int32), weights)


@functools.cache
def frozen_params() -> Any:
    return jax.jit(TargetObjective(TARGET, 16).initialize)(jax.random.key(7))


@functools.cache
def trained(objective: ParallelObjective = OBJECTIVE, **axes: int) -> tuple[list[Any], list[Any]]:
    """Parameters before every step and after the last, and what the steps reported."""
    mesh, optimizer = make_mesh(**axes), make_optimizer(ADAMW)
    shardings = state_shardings(mesh, objective, optimizer)
    step = make_step(objective, optimizer, 3, mesh, shardings)
    frozen = jax.device_put(frozen_params(), param_shardings(mesh, frozen_params()))
    rows = NamedSharding(mesh, ROWS)
    data = jax.tree.map(lambda part: jax.device_put(part, rows), batch())
    state = initial_state(objective, optimizer, shardings, seed=1)
    params, reports = [jax.device_get(state.params)], []
    for _ in range(STEPS):
        state, found = step(state, frozen, data, np.float32(RATE))
        params.append(jax.device_get(state.params))
        reports.append(jax.device_get(found))
    assert step._cache_size() == 1, "one program for every draw and step"
    return params, reports


def stored(folder: Path, params: Any) -> dict[str, np.ndarray]:
    """Parameters under the names of a draft's folder."""
    save_draft(folder, DRAFT, jax.tree.map(jnp.asarray, params), target=TARGET)
    return {name: np.array(each) for name, each in load_file(folder / "model.safetensors").items()}


def oracle_rows(oracle: Any, anchors: Any, tokens: Any, places: Any, view: Any) -> Any:
    """The target's logits at the slots of every whole or cut block, and the draft's."""
    from tests.models.parallel_oracle import torch

    embedding, head = (torch.from_numpy(np.array(frozen_params()[name])) for name in TABLES)
    hidden, keys, values = (torch.from_numpy(np.array(each)) for each in view)
    places, text = torch.from_numpy(np.array(places)), embedding[torch.from_numpy(tokens)]
    for anchor in map(int, anchors):
        slots = np.arange(anchor, min(anchor + 4, len(tokens) - 1))
        at = torch.cat([torch.arange(anchor), torch.arange(anchor, anchor + 4).clamp(max=12)])
        found = oracle.hidden(
            text[anchor], text[:anchor], places[at], keys[:anchor], values[:anchor]
        )
        logits = found[: len(slots)] @ head.T + oracle.correction(tokens[slots].tolist())
        yield slots, hidden[slots] @ head.T, logits


def oracle_loss(oracle: Any, draws: Any, data: Batch, views: Any) -> Any:
    """The loss of a whole batch."""
    from tests.models.parallel_oracle import torch

    decays = np.exp(-np.arange(4) / 2.0)
    decays = torch.from_numpy((3 * decays / decays.sum()).astype(np.float32))
    total = torch.zeros(())
    for a, b in np.ndindex(*ROWS_):
        tokens, view = data.tokens[a, b], [each[b] for each in views[a][:3]]
        places, weights = draws.positions[a, b], torch.from_numpy(data.weights[a, b])
        for slots, wanted, logits in oracle_rows(oracle, draws.anchors[a, b], tokens, places, view):
            q, labels = logits.log_softmax(-1), torch.from_numpy(tokens[slots + 1]).long()
            text = torch.nn.functional.nll_loss(q, labels, reduction="none")
            distance = (q.exp() - wanted.softmax(-1)).abs().sum(-1)
            counts = weights[slots + 1] * decays[: len(slots)]
            total += (counts * (0.1 * text + 0.9 * distance)).sum()
    return total / data.weights[:, :, 1:].sum()


def test_four_steps_are_those_of_an_implementation_in_pytorch(tmp_path: Path) -> None:
    """Loss, norm of the gradient, and parameters."""
    from tests.models.parallel_oracle import ParallelOracle, torch

    params, reports = trained()
    layer, data, frozen = DRAFT.layer, batch(), frozen_params()
    state = {
        name: torch.from_numpy(each).requires_grad_()
        for name, each in stored(tmp_path, params[0]).items()
        if "cross_attn.k" not in name and "cross_attn.v" not in name
    }
    oracle = ParallelOracle(
        state, 2, layer.num_heads, layer.num_kv_heads, 5, layer.norm_eps, layer.rope_theta
    )
    matrices = {name for name, each in state.items() if not name.endswith(("norm.weight", "bias"))}
    groups = [
        {"params": [state[name] for name in sorted(matrices)], "weight_decay": 0.1},
        {"params": [state[name] for name in sorted(state.keys() - matrices)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-6)
    view = jax.jit(lambda tokens, positions: run_target(TARGET, frozen, tokens, positions))
    root = jax.random.key(3)
    for step in range(STEPS):
        draws = jax.device_get(OBJECTIVE.draw(jax.random.fold_in(root, step), ROWS_, 13))
        views = [jax.device_get(view(data.tokens[a], draws.positions[a])) for a in range(2)]
        loss = oracle_loss(oracle, draws, data, views)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(state.values(), 1.0)
        assert relative_error(reports[step]["loss"], loss.detach()) < 1e-5
        assert relative_error(reports[step]["grad_norm"], norm) < 1e-4
        optimizer.step()
    begun, ended = (stored(tmp_path, params[at]) for at in (0, STEPS))
    for name, each in state.items():
        assert relative_error(ended[name], each.detach()) < 1e-4, name
        assert not np.array_equal(ended[name], begun[name]), name
    # What is measured: agreement with the target's choice, of blocks that are learned whole.
    measured = OBJECTIVE.measure(params[STEPS], frozen, jax.tree.map(lambda part: part[0], data))
    plain, hits = np.broadcast_to(np.arange(13, dtype=np.int32), (2, 13)), []
    with torch.no_grad():
        whole = jax.device_get(view(data.tokens[0], plain))[:3]
        for b in range(2):
            about = data.tokens[0, b], plain[b], [each[b] for each in whole]
            for slots, wanted, logits in oracle_rows(oracle, range(0, 13, 3), *about):
                if len(slots) == 4 and data.weights[0, b, slots + 1].all():
                    hits.append((wanted.argmax(-1) == logits.argmax(-1)).numpy())
    assert len(hits) > 1
    for slot, share in enumerate(np.mean(hits, axis=0)):
        assert measured[f"agree_top1_shift{slot + 1}"] == pytest.approx(share, abs=1e-4)


def test_devices_and_chunks_do_not_change_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block at a time, and a few slots of the loss, of which the last are no whole chunk."""
    monkeypatch.setattr(block_attention, "SCORES", 4 * 4 * 4 * 17)
    assert_same(trained(replace(OBJECTIVE, loss_chunk=10, mlp_chunk=8), fsdp=2, tp=2), trained())


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(found[1], expected[1], strict=True):
        for name, value in other.items():
            assert relative_error(one[name], value) < 1e-5, name
    for one, other in zip(*map(jax.tree.leaves, (found[0][-1], expected[0][-1])), strict=True):
        # Adam divides tiny gradients by themselves: rounding shows a little more than in the loss.
        assert relative_error(one, other) < 1e-4


def test_a_draft_begins_with_a_folder(tmp_path: Path) -> None:
    """A parallel one of the same shape, or a LongSpec draft, whose layer becomes the first."""
    layer, frozen, stages = random_draft(DRAFT.layer), frozen_params(), (STAGE,)
    longspec.save_draft(tmp_path / "longspec", DRAFT.layer, layer, target=TARGET)
    given = Given(TARGET, frozen, stages, 0, "float32", make_mesh(), lambda: np.zeros(104, int))

    def begun(settings: ParallelSettings) -> Any:
        return KINDS["parallel"].begin(settings, given)

    trainer, _, params = begun(replace(SETTINGS, init=str(tmp_path / "longspec")))
    jax.tree.map(np.testing.assert_array_equal, params["layers_0"], layer)
    fresh = begun(SETTINGS)
    assert fresh.params is None and fresh.trainer == replace(trainer, settings=SETTINGS)
    shapes = jax.eval_shape(OBJECTIVE.initialize, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    trainer.save(tmp_path / "own", params)
    again = begun(replace(SETTINGS, init=str(tmp_path / "own"))).params
    jax.tree.map(np.testing.assert_array_equal, again, params)
    with pytest.raises(ValueError, match="draft.block=6, and the draft .* has 4; set --config"):
        begun(replace(SETTINGS, init=str(tmp_path / "own"), block=6))
