"""What partial verification over retrieved context gives beside one-level speculation.

Weights and cached keys and values are random and of the real shapes. Whole decodes run in one
compiled loop each. Random weights agree with themselves neither on what a draft proposed nor on
what a part of the cache made them draw. So both are drawn instead of earned: how many tokens a
partial round yields (``acceptance``), and how many of them the full verification confirms
(``agreement``, of a token given the one before). Behind a chain that is confirmed to its end, the
draft's tree there is accepted with the same lengths, as far as it is so deep. The work is the real
one: selection, forwards, accepts and commits. ``longspec`` is the same draft and tree without
retrieval.

``chain`` is how many tokens the full verification is handed at most, ``end`` the tree of the draft
that it verifies behind them, ``nodes`` all of these. ``partial_round_ms`` and ``full_round_ms``
come from decodes with the most and the fewest partial rounds between full ones: the difference is
partial rounds alone, what remains is a full round with its selection and the draft's tree.
``acceptance_length`` is emitted tokens over full target forwards.

With ``offload`` the cache lies in the host's memory, and ``plain`` is decoding of one token per
forward over it. ``host_bytes`` of the cache are there; ``device_limit_bytes`` is what jax may take
of the device (``XLA_PYTHON_CLIENT_MEM_FRACTION``), and ``device_peak_bytes`` the most that was
taken so far.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int, UInt

from longspec_jax.axes import Array, Lengths
from longspec_jax.cli import as_options, counted, settled
from longspec_jax.config import TreeConfig
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.view import CacheView
from longspec_jax.drafters.base import NoDraft, Params, SamplingNoise, View
from longspec_jax.drafters.retrieval.draft import RetrievalDraft, RetrievalOptions, behind_chain
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy
from longspec_jax.drafters.tree import AcceptedPath, AcceptRule, Tree

from .acceptance import GOLDEN, AcceptanceLengths, first_at_depth, path_to
from .arguments import SHAPES
from .models import Model, check_memory, random_model
from .report import Report, Row, run_header
from .rounds import Bench, Drawn, LoopTime, Setting
from .timing import announce, rounded, step

PART_ROUNDS = 24
"""Full rounds of the decodes that tell a partial round's time; each of them emits one token."""


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write the files."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    check_contexts(arguments)
    end = arguments.tree if arguments.end is None else arguments.end
    trees = [chain_of(levels, end) for levels in arguments.chain]
    options = [options_of(slots, arguments.tree) for slots in arguments.retrieve]
    settings = [
        setting_of(arguments, shape, context)
        for shape in dict.fromkeys(arguments.shape)
        for context in arguments.context
    ]
    for setting in settings:
        cached = f"{setting.shape} with {setting.context} cached tokens"
        check_memory(cached, setting.device_bytes(arguments.offload))
    if cpu:
        cases = len(settings) * (1 + len(options) * len(trees))
        announce(counted(cases, "case"), sum(each.rough_seconds() for each in settings) * cases)
    draft_options = as_options(arguments.draft_option)
    with Report(run_header(jax.devices()[0].device_kind, __doc__ or ""), arguments.json) as report:
        for shape, of_shape in itertools.groupby(settings, lambda setting: setting.shape):
            step(f"drawing the weights of {shape}")
            model = random_model(SHAPES[shape], arguments.attention, options=draft_options)
            target = dataclasses.replace(model.target, offload=arguments.offload)
            model = dataclasses.replace(model, target=target)
            for setting in of_shape:
                for row in measure(setting, model, options, trees, arguments.agreement):
                    report.add({**row, "draft_options": draft_options}, line(row))
            del model  # Before the next one is drawn.
        for words in verdicts(report.rows):
            print(words)


def options_of(slots: int, tree: TreeConfig) -> RetrievalOptions:
    """Partial verification of the draft's tree over so many tokens.

    Raises:
      ValueError: naming the option, for a number that there cannot be.
    """
    small = slots < RetrievalOptions.retrieve_sinks + RetrievalOptions.retrieve_recent + 64
    sinks = 32 if small else RetrievalOptions.retrieve_sinks
    recent = 64 if small else RetrievalOptions.retrieve_recent
    try:
        return RetrievalOptions(
            slots, retrieve_sinks=sinks, retrieve_recent=recent, retrieve_tree=str(tree)
        )
    except ValueError as error:
        raise ValueError(f"--retrieve: {error}") from None


def check_contexts(arguments: argparse.Namespace) -> None:
    """Raise where as many tokens are retrieved as the longest context has."""
    longest = max(arguments.context)
    for slots in arguments.retrieve:
        if slots >= longest:
            raise ValueError(
                f"--retrieve={slots} leaves nothing out of a context of {longest} tokens, the "
                "longest; name fewer, or a longer --context"
            )


def chain_of(levels: int, end: TreeConfig) -> TreeConfig:
    """A chain of so many tokens with a tree behind it.

    Raises:
      ValueError: naming the option, for more than one forward verifies.
    """
    try:
        return behind_chain(levels, end)
    except ValueError as error:
        raise ValueError(f"--chain={levels}: {error}") from None


def setting_of(arguments: argparse.Namespace, shape: str, context: int) -> Setting:
    """What is decoded."""
    try:
        lengths = AcceptanceLengths.geometric(arguments.acceptance, arguments.tree)
    except ValueError as error:
        raise ValueError(f"--acceptance: {error}") from None
    return Setting(
        *(shape, context, context, arguments.batch, arguments.tree, arguments.new_tokens),
        *(lengths, arguments.repetitions),
    )


def measure(
    setting: Setting,
    model: Model,
    options: Sequence[RetrievalOptions],
    trees: Sequence[TreeConfig],
    agreements: Sequence[float],
) -> Iterator[Row]:
    """The rows of one setting: one level first, then every number of tokens and chain."""
    if model.target.offload:
        step(f"{setting.shape}, {setting.context} cached tokens: plain decoding")
        few = dataclasses.replace(setting, new_tokens=min(setting.new_tokens, PART_ROUNDS))
        bench = Bench.prepare(few, model)
        loop = bench.time_loop(bench.loop(NoDraft())(), NoDraft())
        yield {**described(few), "method": "plain", **figures(loop), **memory(few, model)}
    step(f"{setting.shape}, {setting.context} cached tokens: one level")
    bench, edges = Bench.prepare(setting, model), setting.lengths.edges
    program = bench.loop(bench.drafter, Drawn(setting.tree), edges)()
    loop = bench.time_loop(program, bench.drafter, edges)
    base = {**described(setting), "method": "longspec", **figures(loop), **memory(setting, model)}
    yield base
    del bench
    for option in options:
        if option.retrieve < setting.context:
            for tree in trees:
                yield from two_levels(setting, model, option, tree, agreements, base)


def two_levels(
    setting: Setting,
    model: Model,
    options: RetrievalOptions,
    tree: TreeConfig,
    agreements: Sequence[float],
    base: Row,
) -> Iterator[Row]:
    """The rows of one number of tokens and chain: one for every agreement."""
    step(f"{setting.shape}, {setting.context} cached tokens: {options.retrieve} retrieved, {tree}")
    draft = RetrievalDraft(model.draft, model.config, options)
    model = dataclasses.replace(model, draft=draft)
    # A round commits up to the tree's levels and a bonus: the cache needs slots for that.
    whole = dataclasses.replace(setting, tree=tree)
    few = dataclasses.replace(whole, new_tokens=min(setting.new_tokens, PART_ROUNDS))
    hierarchy, height = model.drafter(tree), setting.tree.num_levels + 1
    slowest, fastest = (AcceptanceLengths.always(each, setting.tree) for each in (1, height))
    benches = [Bench.prepare(whole, model)]
    benches += [dataclasses.replace(benches[0], setting=few)] * 2
    drafters = [
        SimulatedHierarchy.of(hierarchy, each) for each in (setting.lengths, slowest, fastest)
    ]
    accepting = Agreeing(hierarchy.levels)

    def odds(agreement: float) -> tuple[Array, Array]:
        return setting.lengths.edges, jnp.float32(agreement)

    thunks = [
        bench.loop(drafter, accepting, odds(0.0))
        for bench, drafter in zip(benches, drafters, strict=True)
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(lambda compile_: compile_(), thunks))
    bench = benches[0]

    def decoded(which: int, agreement: float) -> LoopTime:
        at = dataclasses.replace(bench, setting=benches[which].setting)
        loop = at.time_loop(programs[which], drafters[which], odds(agreement))
        bench.cache = at.cache
        return loop

    most, fewest = (partial_rounds(hierarchy.levels, height, each) for each in (1, height))
    parts = round_parts(decoded(1, 0.0), decoded(2, 0.0), most, fewest)
    for agreement in agreements:
        found = figures(decoded(0, agreement))
        yield {
            **described(setting),
            "method": "retrieval",
            "retrieve": options.retrieve,
            "chain": hierarchy.levels,
            "end": None if tree.chain is None else str(tree.end),
            "nodes": tree.num_nodes,
            "agreement": agreement,
            **found,
            **memory(setting, model),
            **parts,
            "speedup_over_longspec": rounded(
                found["tokens_per_second"] / base["tokens_per_second"]
            ),
        }


def memory(setting: Setting, model: Model) -> Row:
    """What lies where, if the cache is offloaded."""
    if not model.target.offload:
        return {}
    statistics = jax.devices()[0].memory_stats() or {}
    return {
        "host_bytes": model.target.cache_bytes(setting.batch, setting.capacity).host,
        "device_limit_bytes": statistics.get("bytes_limit"),
        "device_peak_bytes": statistics.get("peak_bytes_in_use"),
    }


def partial_rounds(chain: int, height: int, each: int) -> int:
    """Partial rounds of a proposal if each of them yields so many tokens, of at most ``height``."""
    return max(0, chain - height) // each + 1


def round_parts(many: LoopTime, few: LoopTime, most: int, fewest: int) -> dict[str, float]:
    """Milliseconds of a partial and of a full round.

    Args:
      many: a decode with ``most`` partial rounds before every full one.
      few: a decode with the ``fewest``.
      most: more than those.
      fewest: at least one.
    """
    cycle, short = (1e3 * loop.seconds / loop.rounds for loop in (many, few))
    partial_round = (cycle - short) / (most - fewest) if most > fewest else float("nan")
    return {
        "partial_round_ms": rounded(partial_round),
        "full_round_ms": rounded(short - fewest * partial_round),
    }


def described(setting: Setting) -> Row:
    """What is measured."""
    return {
        "shape": setting.shape,
        "context": setting.context,
        "batch": setting.batch,
        "tree": list(setting.tree.widths),
        "tree_budget": setting.tree.budget,
        "new_tokens": setting.new_tokens,
        "draft_acceptance_length": rounded(setting.lengths.mean),
    }


def figures(loop: LoopTime) -> Row:
    """The figures of one decode."""
    return {
        "acceptance_length": rounded(loop.emitted / loop.row_rounds),
        "round_ms": rounded(1e3 * loop.seconds / loop.rounds),
        "tokens_per_second": rounded(loop.emitted / loop.seconds),
    }


def line(row: Row) -> str:
    """A row for reading."""
    what = {"plain": "plain", "longspec": "one level"}.get(row["method"])
    if what is None:
        what = f"{_case(row)}, agreement {row['agreement']:g}"
    text = (
        f"{row['shape']} {row['context']:>7}  {what:52} {row['acceptance_length']:6.2f} tokens in "
        f"{row['round_ms']:6.2f} ms: {row['tokens_per_second']:6.1f} tokens/s"
    )
    if row["method"] != "retrieval":
        return text
    return (
        f"{text} ({row['speedup_over_longspec']:.2f}x; partial {row['partial_round_ms']:.2f} ms, "
        f"full {row['full_round_ms']:.2f})"
    )


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """The agreement from which each number of tokens and chain pays."""
    retrieved = [row for row in rows if row["method"] == "retrieval"]

    def case(row: Row) -> tuple[Any, ...]:
        return row["shape"], row["context"], _case(row)

    for (shape, context, words), of_case in itertools.groupby(retrieved, case):
        points = [(row["agreement"], row["speedup_over_longspec"]) for row in of_case]
        yield f"{shape} at {context}, {words}: faster than one level {break_even(points)}"


def _case(row: Row) -> str:
    end = "" if row["end"] is None else f" with {row['end']} behind"
    return f"retrieve {row['retrieve']}, chain {row['chain']}{end}"


def break_even(points: Sequence[tuple[float, float]]) -> str:
    """From which agreement on the speedup is above 1, in words; points of both."""
    points = sorted(points)
    if points[0][1] > 1:
        return f"at every agreement from {points[0][0]:g} on"
    for (low, slow), (high, fast) in itertools.pairwise(points):
        if slow <= 1 < fast:
            return f"from an agreement of {low + (high - low) * (1 - slow) / (fast - slow):.3f} on"
    return f"at no agreement up to {points[-1][0]:g}"


@dataclass(frozen=True)
class SimulatedHierarchy(Hierarchy):
    """A hierarchy whose partial rounds yield as many tokens as is drawn."""

    lengths: AcceptanceLengths = AcceptanceLengths((1.0,))

    @classmethod
    def of(cls, hierarchy: Hierarchy, lengths: AcceptanceLengths) -> "SimulatedHierarchy":
        """The same hierarchy with these lengths."""
        fields = dataclasses.fields(hierarchy)
        return cls(**{f.name: getattr(hierarchy, f.name) for f in fields}, lengths=lengths)

    def propose(self, params: Params, state: Any, view: View, noise: SamplingNoise) -> Tree:
        """The real proposal, in a view that accepts as many tokens as is drawn."""
        assert isinstance(view, CacheView)
        fields = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
        simulated = SimulatedView(**fields, shape=self.inner.tree, lengths=self.lengths)
        return super().propose(params, state, simulated, noise)


@dataclass(frozen=True, eq=False)
class SimulatedView(CacheView):
    """A view in which the position draws how many tokens are accepted."""

    shape: TreeConfig = TreeConfig()
    lengths: AcceptanceLengths = AcceptanceLengths((1.0,))

    def accept(self, tree: Tree, draws: Int[Array, "B T"], levels: int) -> AcceptedPath:
        """The path to the first node of the drawn depth; the real accept runs, too."""
        place = _scattered(self.position)[:, None]
        count = 1 + (place >= self.lengths.edges).sum(axis=1, dtype=jnp.int32)
        return first_at_depth(tree, draws, levels, count, self.shape)


@dataclass(frozen=True)
class Agreeing:
    """How full forwards accept chains of so many tokens; ``given`` are edges and agreement."""

    chain: int

    def __call__(self, given: Any, rows: Rows, rounds: Array) -> AcceptRule:
        """The rule of one round."""
        edges, agreement = given
        return functools.partial(
            accept_agreed, edges=edges, agreement=agreement, chain=self.chain, rounds=rounds
        )


def accept_agreed(
    tree: Tree,
    draws: Int[Array, "B T"],
    levels: int,
    *,
    edges: UInt[Array, " h"],
    agreement: Array,
    chain: int,
    rounds: Lengths,
) -> AcceptedPath:
    """What a full forward confirms of a chain and accepts behind it, and a bonus.

    The first three arguments are those of :func:`longspec_jax.drafters.tree.accept`.

    Args:
      tree: its first levels are a chain.
      draws: the target's.
      levels: of the tree.
      edges: of the acceptance lengths behind the chain.
      agreement: with which a token is confirmed, given the one before.
      chain: tokens of a whole chain.
      rounds: of each row so far.
    """
    offered = (tree.parents[:, 1 : chain + 1] >= 0).sum(axis=1, dtype=jnp.int32)
    drawn = (_evenly(rounds).astype(jnp.float32) + 0.5) / 2.0**32
    confirmed = jnp.log(drawn) / jnp.log(jnp.clip(agreement, 1e-6, 1 - 1e-6))
    confirmed = jnp.minimum(jnp.minimum(confirmed, chain).astype(jnp.int32), offered)
    wanted = (_scattered(rounds)[:, None] >= edges).sum(axis=1, dtype=jnp.int32)
    # Of the tree at the chain's end the first node of the drawn depth, or of the deepest there is.
    depths = tree.mask.sum(axis=2, dtype=jnp.int32) - 1
    behind = (jnp.arange(depths.shape[1]) > chain) & (tree.parents >= 0)
    hangs = (behind & (tree.parents == offered[:, None])).any(axis=1)
    reached = jnp.minimum(offered + wanted, jnp.where(behind, depths, 0).max(axis=1, initial=0))
    further = hangs & (confirmed == offered) & (reached > offered)
    node = jnp.argmax(behind & (depths == reached[:, None]), axis=1)
    last = jnp.where(further, node, confirmed)
    count = 1 + jnp.where(further, reached, confirmed)
    return path_to(tree, draws, levels, depths, last, count)


def _evenly(number: Lengths) -> UInt[Array, " B"]:
    """A sequence that fills 0 ... 2**32 evenly in any run of numbers, another in every row."""
    row = jnp.arange(number.shape[0], dtype=jnp.uint32) * jnp.uint32(0x85EBCA6B)
    return row + (number.astype(jnp.uint32) + 1) * jnp.uint32(GOLDEN)


def _scattered(number: Lengths) -> UInt[Array, " B"]:
    """The same without order: of positions, whose steps depend on what was drawn before."""
    bits = _evenly(number)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)
