"""What partial verification over retrieved context gives beside one-level speculation.

Weights and cached keys and values are random and of the real shapes. Whole decodes run in one
compiled loop each; how many tokens a partial round yields (``acceptance``) and how many of them the
full verification confirms (``agreement``, of a token given the one before) are drawn instead of
earned (``infer.bench.simulated_hierarchy``). ``--acceptance`` is that of all nodes of the draft's
tree, of which a budget keeps its share (``infer.bench.kept_acceptance``),
``draft_acceptance_length`` what is drawn; the tree at the chain's end is drawn with the same
lengths, as far as it is so deep. ``longspec`` is the same draft and tree without retrieval,
``at_budget`` the same at a context as long as the working set: what a partial round is to be
compared with.

``chain`` is how many tokens the full verification is handed at most, ``end`` the tree of the draft
that it verifies behind them, ``nodes`` all of these. ``partial_round_ms`` and ``full_round_ms``
come from decodes with the most and the fewest partial rounds between full ones: the difference is
partial rounds alone, what remains is a full round with its selection and the draft's tree.
``choose_ms`` (scores and the best blocks) and ``select_ms`` (the same and laying them end to end)
are timed apart, in programs of their own; blocks are chosen every ``refresh`` full passes, and laid
end to end for each. ``acceptance_length`` is emitted tokens over full target passes. ``break_even``
is the agreement from which retrieval is faster, between two of those measured; ``modelled_...`` and
``best_chain`` (its levels) are what ``infer.bench.chain_cost`` makes of the times.

With ``offload`` the cache lies in the host's memory, but for ``at_budget``, and ``plain`` is
decoding of one token per pass over it. ``host_bytes`` of the cache are there then;
``device_limit_bytes`` is what jax may take of the device (``XLA_PYTHON_CLIENT_MEM_FRACTION``), and
``device_peak_bytes`` the most that was taken so far.
"""

import argparse
import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.config import MAX_TREE_LEVELS, TreeConfig
from longspec_jax.decoding.engine import decode
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.view import CacheView
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.retrieval.blocks import CachedSelection, Quest, every
from longspec_jax.drafters.retrieval.draft import behind_chain
from longspec_jax.ops.selection.blocks import BlockBudget

from ..wording import counted
from .arguments import settled
from .chain_cost import ChainCost
from .decode import LoopTime, time_loop, time_part
from .decode_setting import Bench, Setting, rough_seconds, setting_bytes
from .kept_acceptance import kept_lengths
from .models import Model, check_memory, random_model
from .parts import Part
from .progress import announce, step
from .report import Report, Row, run_header
from .retrieval_text import line, verdicts
from .shapes import SHAPES
from .simulated import AcceptanceLengths
from .simulated import simulated_decode as one_level_decode
from .simulated_hierarchy import Odds, SimulatedHierarchy, simulated_decode
from .timing import rounded

PART_ROUNDS = 24
"""Full rounds of the decodes that tell a partial round's time; each of them emits one token."""


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write what was asked for."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    budgets = [budget_of(arguments, slots) for slots in arguments.retrieve]
    check_contexts(arguments)
    trees = [tree_of(levels, end) for levels in arguments.chain for end in ends_of(arguments)]
    settings = [
        setting_of(arguments, shape, context)
        for shape in dict.fromkeys(arguments.shape)
        for context in arguments.context
    ]
    for setting in settings:
        cached = f"{setting.shape} with {setting.context} cached tokens"
        check_memory(cached, setting_bytes(setting, arguments.offload))
    if cpu:
        cases = len(settings) * (1 + len(budgets) * len(trees))
        announce(counted(cases, "case"), sum(map(rough_seconds, settings)) * cases)
    with Report(run_header(jax.devices()[0].device_kind, __doc__ or ""), arguments.json) as report:
        for shape, of_shape in itertools.groupby(settings, lambda setting: setting.shape):
            step(f"drawing the weights of {shape}")
            options = dict(arguments.drafter_option or ())
            model = random_model(SHAPES[shape], arguments.attention, options=options)
            target = dataclasses.replace(model.target, offload=arguments.offload)
            model = dataclasses.replace(model, target=target)
            for setting in of_shape:
                for row in measure(setting, model, budgets, trees, arguments):
                    report.add({**row, "drafter_options": options}, line(row))
            del model  # Before the next one is drawn.
        for words in verdicts(report.rows):
            print(words)


def budget_of(arguments: argparse.Namespace, slots: int) -> BlockBudget:
    """A working set of so many tokens.

    Raises:
      ValueError: naming the option that asks for what cannot be.
    """
    try:
        return BlockBudget(slots, arguments.sinks, arguments.recent, arguments.block)
    except ValueError as error:
        raise ValueError(f"--retrieve: {error}") from None


def check_contexts(arguments: argparse.Namespace) -> None:
    """Raise for a working set that would be the whole of every context."""
    longest = max(arguments.context)
    for slots in arguments.retrieve:
        if slots >= longest:
            raise ValueError(
                f"--retrieve={slots} leaves nothing out of a context of {longest} tokens, the "
                "longest asked for; name fewer, or a longer --context"
            )


def tree_of(levels: int, end: TreeConfig) -> TreeConfig:
    """A chain of so many tokens with a tree behind it.

    Raises:
      ValueError: naming the option, for more than is verified in one pass.
    """
    try:
        return behind_chain(levels, end)
    except ValueError as error:
        raise ValueError(f"--chain={levels}: {error}") from None


def ends_of(arguments: argparse.Namespace) -> list[TreeConfig]:
    """What full passes verify behind the chain: the draft's own tree unless others are named."""
    return [arguments.tree] if arguments.end is None else arguments.end


def setting_of(arguments: argparse.Namespace, shape: str, context: int) -> Setting:
    """What is decoded."""
    try:
        lengths = kept_lengths(arguments.acceptance, arguments.tree)
    except ValueError as error:
        raise ValueError(f"--acceptance: {error}") from None
    return Setting(
        *(shape, context, context, arguments.batch, arguments.tree, arguments.new_tokens),
        *(lengths, arguments.repetitions, arguments.turns),
    )


def measure(
    setting: Setting,
    model: Model,
    budgets: Sequence[BlockBudget],
    trees: Sequence[TreeConfig],
    arguments: argparse.Namespace,
) -> Iterator[Row]:
    """The rows of one setting: one level first, then every budget and chain with its end."""
    if model.target.offload:
        yield plain_decoding(setting, model)
    base = one_level(setting, model)
    yield base
    on_device = dataclasses.replace(model.target, offload=False)
    for budget in budgets:
        if budget.slots < setting.context:
            at_budget = dataclasses.replace(setting, context=budget.slots, shortest=budget.slots)
            compared = one_level(at_budget, dataclasses.replace(model, target=on_device))
            yield {**compared, "method": "at_budget"}
            for tree in trees:
                yield from two_levels(setting, model, budget, tree, arguments, base, compared)


def plain_decoding(setting: Setting, model: Model) -> Row:
    """One token per pass; no more than suffice for a time."""
    step(f"{setting.shape}, {setting.context} cached tokens: plain decoding")
    few = dataclasses.replace(setting, new_tokens=min(setting.new_tokens, PART_ROUNDS))
    return {"method": "plain", **whole_decode(few, model, NoDraft(), decode)}


def one_level(setting: Setting, model: Model) -> Row:
    """Speculation without retrieval."""
    step(f"{setting.shape}, {setting.context} cached tokens: one level")
    drafter, edges = model.drafter(setting.tree), setting.lengths.edges
    found = whole_decode(setting, model, drafter, one_level_decode, 0, given=(edges,))
    return {"method": "longspec", **found}


def whole_decode(
    setting: Setting, model: Model, drafter: Drafter, loop: Any, *static: Any, given: Any = ()
) -> Row:
    """Figures of a loop from the first token to the last.

    Args:
      setting: what is decoded.
      model: with what.
      drafter: of the loop.
      loop: takes target, drafter, ``static``, ``given``, parameters and state.
      *static: what it is compiled for.
      given: what it is run with.
    """
    bench = Bench.prepare(setting, model)
    parts = model.target, drafter, *static, *given
    program = bench.compile(loop, *parts, state=bench.state(drafter))
    return {
        **described(setting),
        **figures(time_loop(bench, program, drafter, *given)),
        **memory(setting, model),
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


def two_levels(
    setting: Setting,
    model: Model,
    budget: BlockBudget,
    tree: TreeConfig,
    arguments: argparse.Namespace,
    base: Row,
    at_budget: Row,
) -> Iterator[Row]:
    """The rows of one budget, chain and end: one for every agreement."""
    step(f"{setting.shape}, {setting.context} cached tokens: {budget.slots} retrieved, {tree}")
    # A round commits up to the tree's levels and a bonus: the cache needs room for that.
    bench = Bench.prepare(dataclasses.replace(setting, tree=tree), model)
    inner = model.drafter(setting.tree)
    quest = Quest(model.config, budget)
    drafter = SimulatedHierarchy(inner, every(arguments.refresh, quest), tree)
    state = bench.state(drafter)
    program = bench.compile(simulated_decode, model.target, drafter, state=state)
    choosing = {
        name: bench.compile(jax.jit(part(model, quest, setting.turns)), state=state.rows)
        for name, part in {"choose_ms": choose, "select_ms": select}.items()
    }
    parts = {
        name: rounded(1e3 * time_part(bench, compiled, bench.state(drafter).rows))
        for name, compiled in choosing.items()
    }

    def decoded(lengths: AcceptanceLengths, agreement: float, tokens: int) -> LoopTime:
        odds = Odds.of(lengths, agreement, setting.batch)
        return time_loop(
            bench, lambda params, state: program(params, given(state, odds, tokens)), drafter
        )

    height = setting.tree.num_levels + 1
    slowest, fastest = (
        decoded(AcceptanceLengths(tuple(float(i == each) for i in range(height))), 0.0, PART_ROUNDS)
        for each in (0, height - 1)
    )
    parts |= round_parts(
        *(slowest, fastest),
        *(rounds_of(drafter.levels, height, each) for each in (1, height)),
    )
    cost = cost_of(parts, setting, tree)
    for agreement in arguments.agreement:
        found = figures(decoded(setting.lengths, agreement, setting.new_tokens))
        yield {
            **described(setting),
            "method": "retrieval",
            "budget": budget.slots,
            "block": budget.block,
            "refresh": arguments.refresh,
            "chain": drafter.levels,
            "end": None if tree.chain is None else str(tree.end),
            "nodes": tree.num_nodes,
            "agreement": agreement,
            **found,
            **memory(setting, model),
            **parts,
            "select_share": rounded(parts["select_ms"] / found["round_ms"]),
            "partial_over_round_at_budget": rounded(
                parts["partial_round_ms"] / at_budget["round_ms"]
            ),
            "speedup_over_longspec": rounded(
                found["tokens_per_second"] / base["tokens_per_second"]
            ),
            **modelled(cost, drafter.levels, agreement, base, setting.batch),
        }


def cost_of(parts: dict[str, float], setting: Setting, tree: TreeConfig) -> ChainCost | None:
    """What rounds take and yield; None where no times were told apart."""
    full, partial = parts["full_round_ms"] / 1e3, parts["partial_round_ms"] / 1e3
    if not (full > 0 and partial > 0):
        return None
    end = 0 if tree.chain is None else tree.end.num_levels
    behind = sum(p * min(i + 1, end + 1) for i, p in enumerate(setting.lengths.probabilities))
    height = setting.tree.num_levels + 1
    # Probabilities may sum to a little less than 1.
    return ChainCost(partial, full, setting.lengths.mean, height, max(1.0, behind))


def modelled(
    cost: ChainCost | None, levels: int, agreement: float, base: Row, rows: int
) -> dict[str, float | None]:
    """What the cost model says of a chain beside what was measured of it.

    Args:
      cost: from times of partial and full rounds.
      levels: of the chain.
      agreement: with which it was measured.
      base: one level.
      rows: decoded together.
    """
    if cost is None:
        return dict.fromkeys(("modelled_tokens_per_second", "modelled_break_even", "best_chain"))
    return {
        "modelled_tokens_per_second": rounded(rows * cost.speed(levels, agreement)),
        "modelled_break_even": cost.break_even(levels, base["tokens_per_second"] / rows),
        "best_chain": cost.best(range(1, MAX_TREE_LEVELS + 1), agreement),
    }


def given(state: SpecState, odds: Odds, tokens: int) -> SpecState:
    """The state with other odds, which it takes along: they are donated with it.

    Args:
      state: at the beginning of a decode.
      odds: those of the decode.
      tokens: the most that it emits, if not fewer are wanted.
    """
    draft = state.rows.draft.replace(odds=jax.tree.map(jnp.copy, odds))
    remaining = jnp.minimum(state.rows.remaining, tokens)
    rows = dataclasses.replace(state.rows, draft=draft, remaining=remaining)
    return dataclasses.replace(state, rows=rows)


def rounds_of(chain: int, height: int, each: int) -> int:
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


def choose(model: Model, quest: Quest, turns: int) -> Part:
    """Scores and the best blocks, nothing read."""
    return _repeated(model, turns, lambda state, view: quest.table(state, view).blocks)


def select(model: Model, quest: Quest, turns: int) -> Part:
    """The same, and laying the blocks of all layers end to end."""
    return _repeated(model, turns, quest.choose)


def _repeated(model: Model, turns: int, ask: Any) -> Part:
    """A part whose every turn asks for one token less, as far as the compiler can tell."""

    def program(params: Params, rows: Rows) -> Any:
        state = rows.draft.real.selector
        if isinstance(state, CachedSelection):
            state = state.retriever

        def asked(length: jax.Array) -> Any:
            at = rows.pending, length, length, rows.done
            return ask(state, CacheView(model.target, params.target, rows.cache, *at))

        def turn(_: jax.Array, found: Any) -> Any:
            used = sum(leaf.ravel()[0].astype(jnp.float32) for leaf in jax.tree.leaves(found))
            return asked(rows.length + jnp.minimum(jnp.int32(used), 0))

        return jax.lax.fori_loop(0, turns, turn, asked(rows.length))

    return program


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
    """Of one decode."""
    return {
        "acceptance_length": rounded(loop.emitted / loop.row_rounds),
        "round_ms": rounded(1e3 * loop.seconds / loop.rounds),
        "tokens_per_second": rounded(loop.emitted / loop.seconds),
    }
