"""The testing kit: tiny models with prime sizes, a lookup-table language model, tolerances."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, AxisType

from longspec_jax.config.target import TargetConfig
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.prefill import prefill_chunks
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.rows import Rows, RowShardings
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Committed, Drafter, Params, View
from longspec_jax.drafters.checkpoints.longspec import draft_table
from longspec_jax.drafters.longspec import DraftConfig, LongSpecParams
from longspec_jax.generation.call import Shape
from longspec_jax.models.layers import INITIAL_SCALE
from longspec_jax.ops.hardware import require_hopper
from longspec_jax.weights.tables import Table, target_table

TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 2e-3}
"""Largest relative error against float64, by dtype; never loosened quietly."""
COMPILED = [pytest.param(True, id="interpret"), pytest.param(False, marks=pytest.mark.gpu)]
"""Whether a kernel is interpreted: everywhere, and compiled on a GPU."""

ALL_PASSES = {"xla_disable_hlo_passes": ""}
"""Options of the compiler for tests of what it makes: ``conftest.py`` turns some passes off."""


def each_row(
    names: str | Sequence[str], table: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test that goes through a table, where ``parametrize`` makes a test of every row.

    For rows that cost too little to be tests: all run, and the rows that fail are named. A row has
    a ``tmp_path`` of its own, and what it patches ends with it; other fixtures are shared.

    Args:
      names: of the arguments that a row holds, as of ``parametrize``.
      table: the rows; each is named by its values.
    """
    fields = [*map(str.strip, names.split(","))] if isinstance(names, str) else [*names]
    rows = [row if len(fields) > 1 else (row,) for row in table]
    assert not any(isinstance(one, type(pytest.param())) for row in rows for one in (row, *row)), (
        "a row with marks is a test of its own: take parametrize"
    )

    def of_one_row(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def of_all(**fixtures: Any) -> None:
            failed, skipped = list[BaseException](), list[BaseException]()
            for index, row in enumerate(rows):
                given = dict(zip(fields, row, strict=True))
                try:
                    with _of_a_row(index, fixtures) as own:
                        test(**own, **given)
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"in the row {given}")
                    failed.append(error)
            if failed:
                raise (
                    failed[0] if len(failed) == 1 else BaseExceptionGroup("rows that fail", failed)
                )
            if skipped and len(skipped) == len(rows):
                raise skipped[0]

        own = signature(test)
        others = [each for name, each in own.parameters.items() if name not in fields]
        vars(of_all)["__signature__"] = own.replace(parameters=others)
        return of_all

    return of_one_row


def in_tiers(names: Iterable[Any], *first: Any) -> list[Any]:
    """Names to parametrise a test with, of which all but the ``first`` are of the second tier."""
    others = pytest.mark.full
    return [name if name in first else pytest.param(name, marks=others) for name in names]


@contextmanager
def _of_a_row(index: int, fixtures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The fixtures of a test for one row of its table."""
    own = dict(fixtures)
    with ExitStack() as stack:
        if "tmp_path" in own:
            own["tmp_path"] = fixtures["tmp_path"] / f"row{index}"
            own["tmp_path"].mkdir()
        if "monkeypatch" in own:
            own["monkeypatch"] = stack.enter_context(fixtures["monkeypatch"].context())
        yield own


def hopper_or_skip() -> None:
    """Skip the test where the kernels that are written for Hopper GPUs cannot run."""
    try:
        require_hopper("this kernel")
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    """Standard normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the programs that are compiled inside, by whichever thread."""
    names: list[str] = []

    def note(event: str, duration_secs: float, *, fun_name: str = "", **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def tiny_target_config(**overrides: Any) -> TargetConfig:
    """A two-layer target with grouped heads and sizes that are unlikely to hide a transposition."""
    fields: dict[str, Any] = dict(
        architecture="LlamaForCausalLM",
        vocab_size=101,
        model_width=36,
        mlp_width=53,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_width=6,
        max_positions=1024,
        dtype="float32",
    )
    return TargetConfig(**{**fields, **overrides})


def random_target(config: TargetConfig, seed: int = 0, scale: float = 4.0) -> Any:
    """Random target parameters, scaled up so that the output distribution is far from uniform."""
    return _given(_drawn(target_table, config, seed, scale))


def random_draft(config: DraftConfig, seed: int = 1, scale: float = 4.0) -> Any:
    """Random draft parameters; norms and biases are random too."""
    return _given(_drawn(draft_table, config, seed, scale))


def draft_params(layer: Any, target: Any) -> LongSpecParams:
    """A draft layer bound to its target's tables."""
    return LongSpecParams.with_target_tables(target, layer)


@partial(jax.jit, static_argnums=0)
def after_prompts(drafter: Drafter, params: Params, tokens: Any, lengths: Any) -> Any:
    """A drafter's state after prompts ``tokens[b, :lengths[b]]`` that arrive as one chunk."""
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    state = drafter.begin(params, *tokens.shape)
    return drafter.extend(params, state, Committed(tokens, jnp.zeros_like(lengths), lengths))


def view_of(pending: jax.Array, length: jax.Array, keys: jax.Array, values: jax.Array) -> View:
    """What a drafter sees of a cache of one layer; there is nothing to run the target with."""
    cache, target = KVCache((keys,), (values,)), TargetModel(tiny_target_config())
    return View(target, None, cache, pending, length, length, jnp.zeros(len(pending), bool))


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """Which nodes of a tree are a node or above it, as a mask; nobody is above -1."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def greedy_beliefs(rows: int, levels: int) -> RoundNoise:
    """SamplingNoise about draws at temperature 0: scores are a draft's logits."""
    return RoundNoise(jnp.zeros((rows, levels + 1, 1)), Sampling.greedy(rows))


def _given(drawn: dict[str, np.ndarray]) -> Any:
    """A copy on the device: a test may change it, or give it to a program."""
    return unflatten_dict({path: jnp.array(leaf) for path, leaf in drawn.items()}, sep="/")


@cache
def _drawn(table: Callable[[Any], Table], config: Any, seed: int, scale: float) -> Any:
    """Parameters by path: matrices ``scale`` as wide as at the start of training.

    Drawn from the name table by numpy: a model that is traced to initialise itself takes longer to
    compile than most tests.
    """
    random = np.random.default_rng(seed)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        normal = random.normal(size=shape).astype(np.float32)
        match path.rsplit("/", 1)[-1]:
            case "scale":
                return 1 + 0.3 * normal
            case name if name.endswith(("bias", "sinks")):
                return 0.3 * normal
            case _:
                return scale * INITIAL_SCALE * normal

    return {
        leaf.path: draw(leaf.path, leaf.shape).astype(jnp.dtype(config.dtype))
        for leaf in table(config).leaves
    }


def relative_error(actual: Any, expected: Any) -> float:
    """``||actual - expected|| / ||expected||`` in float64; NaN never passes a comparison."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


def on_hopper() -> AbstractContextManager:
    """Pretend that the default device is a Hopper GPU, where this version of jax asks for one."""
    if jax.__version_info__ < (0, 11):
        return nullcontext()
    return jax.sharding.use_abstract_mesh(hopper_mesh(x=1))


def hopper_mesh(**axes: int) -> AbstractMesh:
    """A mesh of Hopper GPUs, as this version of jax describes them; jax 0.11 or newer."""
    from jax.sharding import AbstractDevice

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh((*axes.values(),), (*axes,), types, abstract_device=device)


def lowered(call: Callable[..., Any], *operands: Any) -> str:
    """What XLA would be given for a Hopper GPU."""
    with on_hopper():
        return jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def prefill(*prompts: Any, **sizes: Any) -> Rows:
    """The rows after all chunks of some prompts; arguments as in ``prefill_chunks``."""
    *models, tokens, length, request = prompts
    shardings = RowShardings.for_params(models[2].target, len(tokens))
    request = request.replace(speculate=np.ones(len(tokens), bool))
    chunks = prefill_chunks(*models, tokens, length, request, shardings=shardings, **sizes)
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            return end.value


def prefill_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls prefill every prompt alone, as those of a target of ``batch_invariant`` do."""
    sizes = Shape.for_call
    monkeypatch.setattr(
        Shape, "for_call", lambda *given, **named: sizes(*given, **{**named, "alone": True})
    )
