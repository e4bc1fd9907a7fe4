"""Rounds of random models from a filled cache, and their times.

The only file of the benchmarks that knows the engine's round. A decode is a loop of rounds in one
compiled program, from the first token to the last. A round's draft and target forward are also
timed apart: each runs in a loop of known length whose every turn depends on the one before, so that
nothing overlaps and nothing is hoisted out.

Random weights accept almost nothing, so a benchmark without a trained draft decides by itself how
many drafted tokens a round accepts. All else is the real round: the draft grows its tree, the
target verifies it, the real accept runs, and a path that the tree has is committed. Tokens per
second at a published acceptance length are then measured end to end. The acceptance is an array
that a program takes when it runs, so that a sweep over it compiles once. The output is *not* the
target's.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Int, UInt
from scipy.optimize import root_scalar

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding import round as round_lib
from longspec_jax.decoding.cache import KVCache, cache_bytes
from longspec_jax.decoding.rows import Rows, RowShardings
from longspec_jax.decoding.runner import bucket_capacity, slack_slots
from longspec_jax.decoding.sampling import Sampling, SamplingKind
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.tree import AcceptedPath, Tree, accept, node_depths, root_tree
from longspec_jax.ops.partitioned import use_mesh

from .arguments import SHAPES
from .models import Model, abstract, draft_state, filled_cache, target_bytes

GREEDY = SamplingKind.GREEDY
Edges = UInt[Array, " h"]
Part = Callable[[Params, Rows], Any]
"""A program over a round's inputs that repeats one part of it."""


GOLDEN = 2654435769
"""2**32 divided by the golden ratio: multiples of it, modulo 2**32, fill the range evenly."""


def acceptance_edges(mean: float, tree: TreeConfig) -> Edges:
    """How often a round emits 1, 2, ... tokens, for evenly drawn numbers of 32 bits.

    A round emits one token, and one more for every edge that the number is not below. Every level
    is accepted with the same probability, given the one before.

    Args:
      mean: the acceptance length: emitted tokens per target forward, the bonus included.
      tree: of which it is; a budget of N nodes verifies at most N - 1 levels.

    Raises:
      ValueError: for a mean that the tree cannot emit.
    """
    deepest = min(tree.num_levels, tree.num_nodes - 1)
    if not 1 <= mean <= deepest + 1:
        raise ValueError(
            f"a round of tree {tree} emits 1 to {deepest + 1} tokens, and their mean cannot be "
            f"{mean}; choose another, or a deeper tree"
        )
    depths = range(deepest + 1)
    rate = root_scalar(
        lambda rate: sum(rate**depth for depth in depths) - mean, bracket=(0.0, 1.0)
    ).root
    reached = [rate**depth for depth in depths[1:]] + [0.0] * (tree.num_levels - deepest)
    edges = [min(round((1 - share) * 2**32), 2**32 - 1) for share in reached]
    return jnp.asarray(edges, jnp.uint32)


def drawn_count(edges: Edges, rounds: Lengths) -> Lengths:
    """Tokens that each row's next round emits, 1 to the tree's levels + 1.

    The golden-ratio sequence, not independent draws: any run of rounds has nearly the wanted mean,
    so that a short measurement is not off by luck. Rows start at different places.
    """
    rows = jnp.arange(rounds.shape[0], dtype=jnp.uint32)
    place = rows * jnp.uint32(0x85EBCA6B) + rounds.astype(jnp.uint32) * jnp.uint32(GOLDEN)
    return 1 + (place[:, None] >= edges).sum(axis=1, dtype=jnp.int32)


def accept_drawn(
    tree: Tree,
    draws: Int[Array, "B T"],
    levels: int,
    *,
    shape: TreeConfig,
    edges: Edges,
    rounds: Lengths,
) -> AcceptedPath:
    """The path to the first node of the drawn depth, as if the target had drawn its tokens.

    Where a budget has left no node so deep, the path ends earlier and the tokens are repeated. The
    real accept runs, too, so that its cost is part of the round. The first three arguments are
    those of :func:`longspec_jax.drafters.tree.accept`.

    Raises:
      ValueError: for acceptance lengths that the tree does not hold.
    """
    if edges.size > levels:
        raise ValueError(
            f"acceptance lengths up to {edges.size + 1} do not fit a tree of {levels} "
            f"levels, which emits at most {levels + 1}"
        )
    count = drawn_count(edges, rounds)
    depths = jnp.broadcast_to(node_depths(tree, shape), tree.tokens.shape)
    deepest = jnp.minimum(count - 1, depths.max(axis=1))
    last = jnp.argmax(depths == deepest[:, None], axis=1)
    on_path = jnp.take_along_axis(tree.mask, last[:, None, None], axis=1)
    at_depth = on_path & (depths[:, None, :] == jnp.arange(levels + 1)[:, None])
    nodes = jnp.where(at_depth.any(axis=2), jnp.argmax(at_depth, axis=2), last[:, None])
    accepted = jnp.take_along_axis(tree.tokens, nodes, axis=1)
    accepted = jnp.concatenate([accepted[:, 1:], accepted[:, :1]], axis=1)
    bonus = jnp.take_along_axis(draws, last[:, None], axis=1)
    tokens = jnp.where(jnp.arange(levels + 1) < count[:, None] - 1, accepted, bonus)
    ours = AcceptedPath(nodes.astype(jnp.int32), tokens, count)
    real = accept(tree, draws, levels)
    impossible = real.count < 1  # Never true, which the compiler does not know.
    return jax.tree.map(
        lambda theirs, mine: jnp.where(
            impossible.reshape(impossible.shape + (1,) * (mine.ndim - 1)), theirs, mine
        ),
        real,
        ours,
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of a measurement."""

    shape: str
    context: int
    """Committed tokens of a row."""
    batch: int
    tree: TreeConfig
    new_tokens: int
    acceptance: float
    """Mean tokens of a round, the bonus included."""
    repetitions: int
    turns: int = 1
    """Repeats of a part inside its program."""
    weights: str = "whole"
    """How the target's are stored."""
    chunk: int | None = None
    """Tokens of a prompt's chunk, where reading one is timed."""

    @property
    def capacity(self) -> int:
        """Cache slots of a row."""
        needed = self.context + self.new_tokens + slack_slots(self.tree.num_levels)
        return bucket_capacity(needed)

    @property
    def device_bytes(self) -> int:
        """The target's weights and the cache: most of what a setting takes."""
        config = SHAPES[self.shape]
        return target_bytes(config, self.weights) + cache_bytes(config, self.batch, self.capacity)


@struct.dataclass
class Decoded:
    """Rows, and what was counted of them so far."""

    rows: Rows
    rounds: Leaf[Int[Array, " B"]]
    """Target forwards of each row, as long as it was not done."""
    emitted: Leaf[Int[Array, " B"]]
    """Tokens, the one drawn from the prefill not counted."""


@functools.partial(jax.jit, static_argnames=("target", "drafter"), donate_argnames=("rows",))
def decode(
    target: TargetModel, drafter: Drafter, edges: Edges | None, params: Params, rows: Rows
) -> Decoded:
    """Rounds until every row is done, in one program.

    Args:
      target: the target's static part.
      drafter: the drafter's static part.
      edges: of :func:`acceptance_edges`, that rounds draw from; without them the target's draws
        accept.
      params: parameters of both.
      rows: before the first round; donated.
    """

    def round_(now: Decoded) -> Decoded:
        rule = None
        if edges is not None:
            rule = functools.partial(
                accept_drawn, shape=drafter.tree, edges=edges, rounds=now.rounds
            )
        rows, emitted = round_lib.spec_step(target, drafter, params, now.rows, GREEDY, rule)
        return Decoded(rows, now.rounds + (emitted.count > 0), now.emitted + emitted.count)

    none = jnp.zeros_like(rows.length)
    return jax.lax.while_loop(lambda now: ~now.rows.done.all(), round_, Decoded(rows, none, none))


def rows_at(cache: KVCache, draft: Any, batch: int, context: int, new_tokens: int) -> Rows:
    """``batch`` greedy rows after ``context`` committed tokens and the first of ``new_tokens``.

    The cache is not copied. Rows stop at nothing but their number of tokens.
    """
    length = jnp.full((batch,), context, jnp.int32)
    return Rows(
        cache=cache,
        draft=draft,
        length=length,
        pending=jnp.ones_like(length),
        remaining=jnp.full((batch,), new_tokens - 1, jnp.int32),
        sampling=jax.tree.map(jnp.copy, Sampling.greedy(batch)),
        stop_tokens=jnp.full((batch, 1), -1),
        speculate=jnp.ones((batch,), bool),
    )


@dataclasses.dataclass(frozen=True)
class LoopTime:
    """A whole decode, timed."""

    seconds: float
    rounds: int
    """Target forwards: the most that any row needed."""
    emitted: int
    """Tokens of all rows, the one drawn from the prefill not counted."""
    row_rounds: int
    """Target forwards summed over rows, each as long as it was not done."""


@dataclasses.dataclass
class Bench:
    """A setting with its model, and the cache that the measurements hand to one another."""

    setting: Setting
    model: Model
    cache: KVCache

    @classmethod
    def prepare(cls, setting: Setting, model: Model) -> "Bench":
        """Fill a cache."""
        bench = cls(setting, model, filled_cache(model.target, setting.batch, setting.capacity))
        places = bench.cache.shardings(bench.shardings.cache)
        bench.cache = jax.device_put(bench.cache, places)
        return bench

    @property
    def shardings(self) -> RowShardings:
        """How the rows lie next to the target's parameters."""
        return RowShardings.for_params(self.model.params.target, self.setting.batch)

    @functools.cached_property
    def drafter(self) -> Any:
        """The draft with the setting's tree."""
        return self.model.drafter(self.setting.tree)

    def rows(self, drafter: Any) -> Rows:
        """The rows before the first round; they take the cache along."""
        setting = self.setting
        draft = draft_state(self.model, drafter, setting.batch, setting.capacity)
        rows = rows_at(self.cache, draft, setting.batch, setting.context, setting.new_tokens)
        return jax.device_put(rows, rows.shardings(self.shardings))

    def loop(self, drafter: Any, edges: Edges | None = None) -> Callable[[], Any]:
        """What compiles a decode, for later: a program of edges, parameters and rows."""
        inputs = abstract((edges, self.model.params, self.rows(drafter)))
        return lambda: decode.lower(self.model.target, drafter, *inputs).compile()

    def part(self, part: Callable[..., Part], drafter: Any) -> Callable[[], Any]:
        """What compiles a part of a round, for later: a program of parameters and rows."""
        program = jax.jit(self._on_mesh(part(self.model.target, drafter, self.setting.turns)))
        inputs = abstract((self.model.params, self.rows(drafter)))
        return lambda: program.lower(*inputs).compile()

    def prompt(self, chunk: int) -> Callable[[], Any]:
        """What compiles reading a prompt, for later: a program of parameters and a cache."""
        read = self._on_mesh(prefill(self.model.target, self.setting, chunk))
        program = jax.jit(read, donate_argnums=1)
        inputs = abstract((self.model.params, self.cache))
        return lambda: program.lower(*inputs).compile()

    def _on_mesh(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """The program as it is traced for the mesh of the target."""

        def traced(*inputs: Any) -> Any:
            with use_mesh(self.model.target.mesh):
                return program(*inputs)

        return traced

    def time_prompt(self, program: Any) -> float:
        """Seconds of reading a prompt, the less of two runs."""
        seconds = []
        for _ in range(2):
            cache = jax.block_until_ready(self.cache)
            begin = time.perf_counter()
            self.cache, _ = jax.block_until_ready(program(self.model.params, cache))
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    def time_loop(self, program: Any, drafter: Any, edges: Edges | None = None) -> LoopTime:
        """Median seconds of decoding the setting's tokens."""

        def once() -> tuple[Decoded, float]:
            rows = jax.block_until_ready(self.rows(drafter))
            begin = time.perf_counter()
            done = jax.block_until_ready(program(edges, self.model.params, rows))
            seconds = time.perf_counter() - begin
            self.cache = done.rows.cache
            return done, seconds

        last, _ = once()  # The first run is a warm-up.
        seconds = []
        for _ in range(self.setting.repetitions):
            last, elapsed = once()
            seconds.append(elapsed)
        rounds, emitted = np.asarray(last.rounds), np.asarray(last.emitted)
        median = statistics.median(seconds)
        return LoopTime(median, int(rounds.max()), int(emitted.sum()), int(rounds.sum()))

    def time_part(self, program: Any, drafter: Any) -> float:
        """Median seconds of one turn of a part."""
        rows, seconds = self.rows(drafter), []
        for _ in range(self.setting.repetitions + 1):
            begin = time.perf_counter()
            jax.block_until_ready(program(self.model.params, rows))
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds[1:]) / self.setting.turns


def prefill(
    target: TargetModel, setting: Setting, chunk: int
) -> Callable[[Params, KVCache], tuple[KVCache, Array]]:
    """Reading a prompt of whole chunks, at most the context, without what a draft makes of it."""
    chunks = setting.context // chunk

    def program(params: Params, cache: KVCache) -> tuple[KVCache, Array]:
        full = functools.partial(jnp.full, (setting.batch,), dtype=jnp.int32)

        def turn(index: Array, state: tuple[KVCache, Array]) -> tuple[KVCache, Array]:
            cache, first = state
            tokens = (first[:, None] + jnp.arange(chunk)) % target.vocab_size
            start, last = full(index * chunk), full(chunk - 1)
            read = target.prefill_chunk(params.target, cache, tokens, start, last)
            return read.cache, read.logits.argmax(axis=-1).astype(jnp.int32)

        return jax.lax.fori_loop(0, chunks, turn, (cache, full(1)))

    return program


def draft(target: TargetModel, drafter: Drafter, turns: int) -> Part:
    """Growing the tree; the next turn's root is the last node of this one."""

    def program(params: Params, rows: Rows) -> Tree:
        def turn(_: Array, tree: Tree) -> Tree:
            now = _after(rows, tree.tokens[:, -1])
            noise = round_lib.sampling_noise(target, drafter, now, GREEDY)
            found = round_lib.propose_tree(target, drafter, params, now, noise)
            # As of the tree that it begins with.
            return dataclasses.replace(found, totals=None, sources=None, paths=None)

        return jax.lax.fori_loop(0, turns, turn, some_tree(drafter.tree, rows))

    return program


def verify(target: TargetModel, drafter: Drafter, turns: int) -> Part:
    """The target forward with LM head and draws; the next turn's nodes are this one's draws."""

    def program(params: Params, rows: Rows) -> Array:
        tree = some_tree(drafter.tree, rows)

        def turn(_: Array, draws: Array) -> Array:
            now = _after(rows, draws[:, -1])
            noise = round_lib.sampling_noise(target, drafter, now, GREEDY)
            planted = dataclasses.replace(tree, tokens=draws)
            return round_lib.verify_tree(target, drafter, params, now, planted, noise)[1]

        return jax.lax.fori_loop(0, turns, turn, tree.tokens)

    return program


PARTS: tuple[Callable[..., Part], ...] = (draft, verify)
"""Parts of a round that are timed apart; their names are those of the figures."""


def _after(rows: Rows, tokens: Array) -> Rows:
    """The rows with other pending tokens, all of them depending on these as far as XLA knows."""
    zero = jnp.minimum(tokens, 0)  # Tokens are not negative, which the compiler does not know.
    return dataclasses.replace(rows, pending=tokens, length=rows.length + zero)


def some_tree(shape: TreeConfig, rows: Rows) -> Tree:
    """A tree of this shape with different tokens; every node sees the first of each level above.

    A budget keeps the nodes that are grown first. Those that only lookup fills are children of the
    root.
    """
    batch, nodes = rows.pending.shape[0], shape.num_nodes
    known = (*shape.depths, *(1,) * nodes)[:nodes]
    first = jnp.asarray([known.index(depth) for depth in known])
    depths, node = jnp.asarray(known), jnp.arange(nodes, dtype=jnp.int32)
    on_spine = (node == first) & (depths < depths[:, None])
    tree = root_tree(rows.pending, shape)
    mask = on_spine | jnp.eye(nodes, dtype=bool)
    return dataclasses.replace(
        tree,
        tokens=jnp.broadcast_to(node + 1, (batch, nodes)),
        parents=jnp.pad(tree.parents, ((0, 0), (0, nodes)))[:, :nodes],
        mask=jnp.broadcast_to(mask, (batch, nodes, nodes)),
    )
