"""What is decoded to compare speculation with plain decoding: three unlike rows of tiny models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.rows import Request, Rows
from longspec_jax.decoding.runner import ModelRunner
from longspec_jax.decoding.sampling import Sampling, SamplingKind
from longspec_jax.decoding.slots import StepOutput
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.drafters.retrieval.selection import SinksAndRecent
from longspec_jax.drafters.small_lm import SmallLMDrafter
from longspec_jax.models.target import Target, sinks_of
from longspec_jax.ops.attention.reference import causal_attention
from tests.kit import draft_params, random_draft, random_target, tiny_target_config
from tests.lookup import LookupTarget, random_table

VOCABULARY = 13
TREES = [
    TreeConfig((4, 5, 3)),
    TreeConfig((1, 1, 1, 1)),
    TreeConfig((2,)),
    TreeConfig((3, 7, 7, 2)),
]
LENGTHS = np.array([19, 7, 1], np.int32)
NEW = np.array([31, 23, 17], np.int32)
TABLE = random_table(0, 97, VOCABULARY)
DRAFT_TABLES = {
    "perfect": TABLE,
    "near": TABLE + random_table(1, 97, VOCABULARY, 0.7),
    "random": random_table(2, 97, VOCABULARY),
    "adversarial": -TABLE,
}
CONFIG = tiny_target_config()
WINDOW = 11  # Shorter than the prompts, so that the ring wraps.
DRAFT = DraftConfig.for_target(CONFIG, window=WINDOW)
SMALL = tiny_target_config(
    architecture="Qwen3ForCausalLM", qk_norm=True, num_layers=1, model_width=20, vocab_size=97
)
SMALL_LM = SmallLMDrafter(SMALL, TreeConfig((4, 5, 3), budget=9), narrower=True)
"""Of another family than the target, and without its last four tokens."""


def request(
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    seeds: Any = (5, 6, 7),
    stop: Any = ((-1,),) * 3,
    new: Any = NEW,
    min_p: Any = 0.0,
) -> Request:
    """A batch's requests; scalars hold for every row."""
    rows = len(seeds)

    def spread(value: Any, dtype: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

    sampling = Sampling(
        spread(temperature, jnp.float32),
        spread(top_k, jnp.int32),
        spread(top_p, jnp.float32),
        jnp.asarray(seeds, jnp.uint32),
        jnp.log(spread(min_p, jnp.float32)),
        kind_of(temperature, top_k, top_p, min_p),
    )
    return Request(sampling, jnp.asarray(stop, jnp.int32), jnp.asarray(new, jnp.int32))


def prompts(vocabulary: int, lengths: np.ndarray = LENGTHS, seed: int = 0) -> np.ndarray:
    """Random prompts, the padding random too: it must not matter."""
    shape = (len(lengths), int(lengths.max()))
    return np.random.default_rng(seed).integers(0, vocabulary, shape).astype(np.int32)


def kind_of(temperature: Any, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0) -> SamplingKind:
    """The least kind that serves these rows."""
    if np.any(np.asarray(top_k) > 0) or np.any(np.asarray(top_p) < 1) or np.any(min_p):
        return SamplingKind.ANY
    return SamplingKind.SAMPLED if np.any(np.asarray(temperature) > 0) else SamplingKind.GREEDY


@dataclass(frozen=True)
class Counts:
    """What a run emitted, as arrays of all rows."""

    output: np.ndarray
    drafted: np.ndarray
    emitted: np.ndarray
    rounds: np.ndarray
    histogram: np.ndarray
    sources: np.ndarray


@dataclass(frozen=True)
class Decoded:
    """A run at its end."""

    rows: Rows
    record: Counts


def engine_with(target: Any, drafters: Sequence[Drafter], params: Any, **options: Any) -> Engine:
    """An engine of these options, its own and its runner's."""
    sizes = {
        each.name: options.pop(each.name) for each in fields(ModelRunner) if each.name in options
    }
    return Engine(ModelRunner(target, tuple(drafters), params, **sizes), **options)


def engine_of(
    target: Any,
    drafters: Sequence[Drafter],
    params: Any,
    tokens: Any,
    lengths: Any,
    req: Request,
    capacity: int = 128,
    chunk: int = 8,
    **options: Any,
) -> Engine:
    """An engine to which the rows are submitted, all of them together."""
    engine = engine_with(
        *(target, drafters, params),
        slots=len(lengths),
        capacity=capacity,
        chunks=(chunk,),
        stop_width=req.stop_tokens.shape[1],
        **{"streams": False, "together": True, **options},
    )
    host = jax.device_get(req)
    for row, length in enumerate(np.asarray(lengths)):
        engine.submit(np.asarray(tokens)[row, :length], host.row(row))
    return engine


def outputs_of(engine: Engine) -> list[StepOutput]:
    """All outputs from now on, to the end of all requests."""
    outputs: list[StepOutput] = []
    while engine.busy:
        outputs += engine.step()
    return outputs


def texts_of(outputs: Sequence[StepOutput]) -> dict[int, np.ndarray]:
    """The tokens of every request."""
    ids = dict.fromkeys(output.id for output in outputs)
    return {id: np.concatenate([out.tokens for out in outputs if out.id == id]) for id in ids}


def run(engine: Engine, rows: int = 3) -> tuple[list[np.ndarray], Decoded]:
    """Emitted tokens of every row, and the end of the run."""
    height = engine.runner.drafter.tree.num_levels + 1
    tokens: list[list[int]] = [[] for _ in range(rows)]
    drafted: list[list[bool]] = [[] for _ in range(rows)]
    sources: list[list[int]] = [[] for _ in range(rows)]
    histogram = np.zeros((rows, height), int)
    for output in outputs_of(engine):
        tokens[output.id] += output.tokens
        drafted[output.id] += output.drafted
        sources[output.id] += output.sources
        for accepted in output.rounds:
            histogram[output.id, accepted] += 1
    engine.finish()
    emitted = np.asarray(list(map(len, tokens)))
    record = Counts(
        _padded(tokens, int),
        _padded(drafted, bool),
        emitted,
        histogram.sum(axis=1),
        histogram,
        _padded(sources, int),
    )
    return [np.asarray(row) for row in tokens], Decoded(engine.rows, record)


def _padded(rows: list[list[Any]], dtype: Any) -> np.ndarray:
    whole = np.zeros((len(rows), max(map(len, rows))), dtype)
    for row, values in zip(whole, rows, strict=True):
        row[: len(values)] = values
    return whole


def generate(target, drafter, params, tokens, lengths, req, capacity=128, chunk=8, **options):
    """Emitted tokens of every row, and the end of the run."""
    given = tokens, lengths, req, capacity, chunk
    return run(engine_of(target, [drafter], params, *given, **options), len(lengths))


def assert_same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Every row is the same token for token."""
    for row, (a, e) in enumerate(zip(actual, expected, strict=True)):
        np.testing.assert_array_equal(a, e, err_msg=f"row {row}")


def assert_lossless(target, drafter, params, tokens, lengths, req, plain, **options) -> Decoded:
    """The text is that of plain decoding, and draft tokens were accepted; the end of the run."""
    rows, state = generate(target, drafter, params, tokens, lengths, req, **options)
    assert_same(rows, plain)
    assert emitted_in_rounds(state) > 0
    return state


@dataclass(frozen=True, eq=False)
class Prompted:
    """A target with prompts, whose text no drafter may change."""

    target: Any
    params: Any
    """The target's."""
    tokens: np.ndarray
    lengths: np.ndarray = field(default_factory=lambda: LENGTHS)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Capacity and chunk, where they are not the usual ones."""
    _known: dict[bytes, list[np.ndarray]] = field(default_factory=dict)

    def run(
        self, drafter: Drafter, draft: Any, req: Request, **options: Any
    ) -> tuple[list[np.ndarray], Decoded]:
        """Emitted tokens of every row, and the end of the run; ``draft`` may hold both models."""
        params = draft if isinstance(draft, Params) else Params(self.params, draft)
        given = self.target, drafter, params, self.tokens, self.lengths, req
        return generate(*given, **{**self.sizes, **options})

    def plain(self, req: Request) -> list[np.ndarray]:
        """The text of plain decoding, which is decoded once."""
        own = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(req))
        if own not in self._known:
            self._known[own] = self.run(NoDraft(), (), req)[0]
        return self._known[own]

    def same(
        self, drafter: Drafter, draft: Any, requests: Sequence[Request], **options: Any
    ) -> list[Decoded]:
        """The ends of the runs, whose text is that of plain decoding."""
        states = []
        for req in requests:
            rows, state = self.run(drafter, draft, req, **options)
            assert_same(rows, self.plain(req))
            states.append(state)
        return states

    def drafted(
        self, drafter: Drafter, draft: Any, requests: Sequence[Request], **options: Any
    ) -> list[Decoded]:
        """The same; and in each of the runs draft tokens were accepted."""
        states = self.same(drafter, draft, requests, **options)
        assert all(emitted_in_rounds(state) > 0 for state in states)
        return states

    def text(self, row: int, req: Request) -> list[int]:
        """What the cache holds of a row at its end: not the last token."""
        return [*self.tokens[row, : self.lengths[row]], *self.plain(req)[row][:-1]]


@partial(jax.jit, static_argnames=("config", "recur"))
def dense(config: TargetConfig, params: Any, tokens: jax.Array, recur: Any = None) -> jax.Array:
    """Logits of whole texts ``[B, T]``, whose windows are masks of positions."""

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        window = config.layer(layer).window
        scores: Any = dict(scale=config.attention_scale, cap=config.attention_cap)
        behind = None if window is None else window - 1
        return causal_attention(q, k, v, sinks_of(params, layer), window=behind, **scores)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model, variables = Target(config), {"params": params}
    more = {} if recur is None else {"recur": recur}
    output: Any = model.apply(variables, tokens, positions, attend, **more)
    return model.apply(variables, output.hidden, method="unembed")  # pyright: ignore


def assert_rows_come_and_go(target, drafter, params, tokens, lengths, req, plain) -> None:
    """Five requests in two slots, one of them cancelled, have the texts of plain decoding.

    The first prompt returns, with the chunks that the host kept; slots by themselves share nothing.
    """
    sizes: Any = dict(slots=2, capacity=128, chunks=(8,), stop_width=1)
    engine = engine_with(target, [drafter], params, **sizes, prefixes=True, host_bytes=1 << 20)
    order, outputs = [1, 0, 2, 0, 1], []
    ids = [engine.submit(tokens[row, : lengths[row]], req.row(row)) for row in order[:3]]
    extra = engine.submit(tokens[0, :50], req.row(2))
    while sum(len(output.tokens) for output in outputs if output.id == extra) < 3:
        outputs += engine.step()
    engine.cancel(extra)
    outputs += outputs_of(engine)
    engine.prefixes.collect(wait=True)
    ids += [engine.submit(tokens[row, : lengths[row]], req.row(row)) for row in order[3:]]
    outputs += outputs_of(engine)
    texts, cached = texts_of(outputs), {out.id: out.cached_tokens for out in reversed(outputs)}
    assert_same([texts[id] for id in ids], [plain[row] for row in order])
    assert [cached[id] for id in ids] == [0, 0, 0, 56, 24]
    engine.finish()


SHORT = SinksAndRecent(2, 5)
"""Less than all but the shortest prompt."""
MIXED = dict(temperature=(0.0, 0.7, 1.0))
GREEDY = [request()]
EVERY = [
    request(np.roll((0.0, 0.7, 1.0), turn), np.roll((0, 5, 0), turn), np.roll((1, 0.9, 1), turn))
    for turn in range(3)
]
"""Every row of the batch is greedy once, once filtered at 0.7, once free at 1: of one program."""


def emitted_in_rounds(state: Decoded) -> int:
    """Accepted draft tokens, but for a row's last round, which its budget may cut."""
    return int((state.record.emitted - 1 - state.record.rounds).sum())


LOOKUP = Prompted(LookupTarget(VOCABULARY), TABLE, prompts(VOCABULARY))
"""A lookup table as target."""
TRANSFORMER = Prompted(TargetModel(CONFIG), random_target(CONFIG), prompts(CONFIG.vocab_size))
LONGSPEC = draft_params(random_draft(DRAFT), TRANSFORMER.params)
"""The transformer's draft, of which part is the target's own taste."""
