"""What a decode run measured: for reading, and as JSON.

The JSON holds totals over all rows under the names of the command's documentation, and ``rows``
with the same numbers for each. With a single row ``text`` and ``prompt_tokens`` are that row's own,
with several they are lists. Numbers that do not exist are null: speeds of a comparison that was not
made, the acceptance length of a run without decode rounds.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longspec_jax.checks import shown_bytes
from longspec_jax.cli import counted
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.generation.activity import Tuned
from longspec_jax.generation.comparison import Comparison, Divergence
from longspec_jax.generation.memory import MemoryPlan
from longspec_jax.generation.result import ACCEPTANCE_DEFINITION, GenerateResult, Stats
from longspec_jax.ops.hardware import missing_kernels

from .output import tree_fields, tree_of


@dataclass(frozen=True)
class Outcome:
    """One call, speculative or not, and the plain run next to it if one was made."""

    name: str
    row_names: tuple[str, ...]
    """Where every row was written, for reading."""
    result: GenerateResult
    comparison: Comparison | None = None

    @property
    def stats(self) -> Stats:
        """Counts of the call."""
        return self.result.stats

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """Every row's first difference to plain decoding."""
        return self.comparison.divergences if self.comparison else ()


def as_json(
    outcomes: Sequence[Outcome], setting: dict[str, Any], interrupted: bool = False
) -> dict[str, Any]:
    """Everything measured."""
    rows = [row for outcome in outcomes for row in _rows(outcome)]
    columns = {name: [row[name] for row in rows] for name in ("prompt_tokens", "text")}
    return {
        "interrupted": interrupted,
        "acceptance_definition": ACCEPTANCE_DEFINITION,
        **_totals(outcomes),
        **{name: columns[name][0] if len(rows) == 1 else columns[name] for name in columns},
        "setting": setting,
        "memory": asdict(outcomes[0].stats.memory) if outcomes else None,
        "rows": rows,
    }


def _totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    stats = [outcome.stats for outcome in outcomes]
    compared = [outcome.comparison for outcome in outcomes if outcome.comparison]
    plain = [comparison.plain.stats for comparison in compared]
    # A call that decodes plainly is its own comparison, and was compiled once.
    apart = [each.plain.stats for each in compared if each.plain is not each.speculative]
    passes = sum(sum(item.target_passes) for item in stats)
    # Calls may have run trees of different depths.
    columns = itertools.zip_longest(*(item.acceptance_histogram for item in stats), fillvalue=0)
    return {
        "acceptance_length": _ratio(sum(item.decode_tokens for item in stats), passes),
        "acceptance_histogram": [sum(column) for column in columns],
        "new_tokens": sum(sum(item.new_tokens) for item in stats),
        "target_passes": passes,
        "decode_seconds": sum(item.decode_seconds for item in stats),
        "prefill_seconds": sum(item.prefill_seconds for item in stats),
        "compile_seconds": sum(item.compile_seconds for item in (*stats, *apart)),
        "tokens_per_second": _speed(stats),
        "plain_tokens_per_second": _speed(plain) if plain else None,
        "plain_decode_seconds": sum(item.decode_seconds for item in plain) if plain else None,
        "identical_to_plain": all(item.identical for item in compared) if compared else None,
        "lossless": all(item.lossless for item in stats),
        "accepted_by_source": dict(
            sum((Counter(item.accepted_by_source) for item in stats), Counter())
        ),
        "draft_state_bytes": max((item.draft_state_bytes for item in stats), default=None),
        "trees": list(_trees(stats)),
    }


def _trees(stats: Sequence[Stats]) -> Iterator[dict[str, Any]]:
    """What each of the trees did in all calls together."""
    uses = [use for item in stats for use in item.trees]
    for drafter, tree in dict.fromkeys((use.drafter, use.tree) for use in uses):
        own = [use for use in uses if (use.drafter, use.tree) == (drafter, tree)]
        yield {
            "draft": drafter,
            **tree_fields(tree),
            "rounds": sum(u.rounds for u in own),
            "tokens": sum(u.tokens for u in own),
            "seconds": sum(u.seconds for u in own),
        }


def _rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    result, stats = outcome.result, outcome.stats
    for row, tokens in enumerate(result.sequences):
        divergence = next((item for item in outcome.divergences if item.row == row), None)
        yield {
            "name": outcome.row_names[row],
            "prompt_tokens": stats.prompt_tokens[row],
            "new_tokens": stats.new_tokens[row],
            "target_passes": stats.target_passes[row],
            "acceptance_length": _ratio(stats.new_tokens[row] - 1, stats.target_passes[row]),
            "acceptance_histogram": list(stats.histograms[row]),
            "identical_to_plain": divergence is None if outcome.comparison else None,
            "first_divergence": asdict(divergence) if divergence else None,
            "text": result.text[row],
            "tokens": list(tokens),
            "drafted": list(result.drafted[row]),
        }


def header_lines(
    setting: dict[str, Any], config: TargetConfig, tree: TreeConfig | None
) -> Iterator[str]:
    """What will run, for reading; no tree is settled yet where ``tree`` is None.

    It ends with what this jax lacks for this GPU, if it lacks something.
    """
    draft = " and ".join(setting["drafts"]) or "none, so plain decoding (--draft names one)"
    yield (
        f"target {setting['target']} ({config.architecture}, "
        f"{counted(config.num_layers, 'layer')} of width {config.model_width}), draft {draft}; "
        f"{setting['dtype']} on {setting['device']}"
    )
    shape = "a tree that fits this machine" if tree is None else tree_line(tree)
    yield f"{shape}, temperature {setting['temperature']:g}, seed {setting['seed']}"
    if missing := missing_kernels():
        yield missing


def tree_line(tree: TreeConfig) -> str:
    """A tree and its nodes."""
    nodes = counted(tree.num_nodes, "node")
    if tree.selective:
        nodes = f"the best {tree.num_nodes} of {counted(tree.num_proposed, 'node')}"
    return f"tree {tree} ({nodes} per target pass)"


def tuned_line(tuned: Tuned, pays: str) -> str:
    """Which tree a call begins with that names none, and why."""
    tree, timings = tuned.tree, tuned.timings
    several = len({timing.drafter for timing in timings if timing.tree.num_levels}) > 1
    of = f"{tuned.drafter}, " if several and tree.num_levels else ""
    chosen = of + tree_line(tree) if tree.num_levels else "plain decoding"
    if not timings:
        return f"{chosen}, usual on this kind of machine (--tree names another)"
    speeds = {timing.tree: timing.tokens_per_second for timing in timings}
    plain = max((speeds[one] for one in speeds if not one.num_levels), default=None)
    trees = {one: speed for one, speed in speeds.items() if one.num_levels}
    if tree in trees:
        without = "" if plain is None else f", {plain:.0f} without"
        return (
            f"{chosen}, the fastest of {len(timings)} in earlier calls here: "
            f"{trees[tree]:.0f} tokens/s{without} (--tree names another)"
        )
    if tree.num_levels or plain is None or not trees:
        return f"{chosen} (--tree names another)"
    best = max(trees, key=trees.__getitem__)
    return (
        f"{chosen}: no tree paid for this model here: {plain:.0f} tokens/s, {trees[best]:.0f} with "
        f"tree {best} (--tree takes it all the same); {pays}"
    )


def lines(outcomes: Sequence[Outcome], dtype: str, promised: bool = True) -> Iterator[str]:
    """The report of one call, or the totals of several, for reading.

    Args:
      outcomes: the calls.
      dtype: of the target.
      promised: whether text identical to plain decoding's is promised. If not, a difference may be
        rounding.
    """
    totals = _totals(outcomes)
    if not totals["lossless"]:
        yield "not lossless        tokens were emitted that only a part of the context verified"
    yield from _acceptance_lines(totals)
    yield from _speed_lines(totals)
    yield from _tree_lines(totals["trees"])
    stats, plan = outcomes[0].stats, outcomes[0].stats.memory
    yield (
        f"memory              draft state {shown_bytes(stats.draft_state_bytes)}, target cache "
        f"{shown_bytes(plan.cache_bytes)} for {plan.batch} x {plan.capacity} slots{_beside(plan)}"
    )
    yield from _identity_lines(outcomes, dtype, promised)


def _acceptance_lines(totals: dict[str, Any]) -> Iterator[str]:
    length, passes = totals["acceptance_length"], totals["target_passes"]
    if length is None:
        yield "acceptance length   none: no round ran after the token drawn from the prefill"
        return
    yield f"acceptance length   {length:.2f} tokens per target pass"
    yield f"                    ({ACCEPTANCE_DEFINITION})"
    histogram = totals["acceptance_histogram"]
    if len(histogram) == 1:
        return
    yield "rounds by the draft tokens they accepted, and by at least that number"
    yield f"{'accepted':8}  {'rounds':6}  {'':28}{'at least':>9}"
    for depth, count in enumerate(histogram):
        reached = sum(histogram[depth:]) / passes
        bar = "#" * round(30 * count / max(histogram))
        yield f"{depth:8}  {count:6}  {bar:30}  {reached:5.0%}"


def _speed_lines(totals: dict[str, Any]) -> Iterator[str]:
    speed, plain = totals["tokens_per_second"], totals["plain_tokens_per_second"]
    seconds = f"decode {totals['decode_seconds']:.2f}"
    if speed is not None:
        comparison = f", {plain:.1f} without ({speed / plain:.2f}x)" if plain else ""
        yield f"tokens/s            {speed:.1f} with this method{comparison}"
        if plain:
            yield "                    (both: tokens of the decode rounds / their seconds)"
            seconds += f" (without {totals['plain_decode_seconds']:.2f})"
    yield (
        f"seconds             {seconds}, prefill {totals['prefill_seconds']:.2f}, "
        f"compile and warm-up {totals['compile_seconds']:.2f}, each apart"
    )


def _tree_lines(trees: Sequence[dict[str, Any]]) -> Iterator[str]:
    if len(trees) < 2:
        return
    yield "trees               chosen by tokens/s as the run went"
    wide = max(10, *(len(use["draft"]) for use in trees))
    yield f"  {'draft':{wide}}  {'tree':20}  rounds  tokens  ms/round"
    for use in trees:
        each = f"{1000 * use['seconds'] / use['rounds']:8.2f}" if use["rounds"] else ""
        shape = str(tree_of(use))
        yield f"  {use['draft']:{wide}}  {shape:20}  {use['rounds']:6}  {use['tokens']:6}  {each}"


def memory_plan_line(plan: MemoryPlan) -> str:
    """What a call will take, for reading before it begins."""
    return (
        f"memory plan: weights {shown_bytes(plan.target_bytes)}, draft "
        f"{shown_bytes(plan.draft_bytes)}, cache {shown_bytes(plan.cache_bytes)} for {plan.batch} "
        f"x {plan.capacity} slots{_beside(plan)}, draft state "
        f"{shown_bytes(plan.draft_state_bytes)}, working memory about "
        f"{shown_bytes(plan.working_bytes)}"
    )


def _beside(plan: MemoryPlan) -> str:
    """What of the cache is not on the device, and what windows and states save."""
    host, saved = plan.host_cache_bytes, plan.saved_bytes
    beside = f" and {shown_bytes(host)} in the host's memory" if host else ""
    return beside + (
        f" ({shown_bytes(saved)} less by layers of windows or states)" if saved else ""
    )


def _identity_lines(outcomes: Sequence[Outcome], dtype: str, promised: bool) -> Iterator[str]:
    compared = [outcome for outcome in outcomes if outcome.comparison]
    if not compared:
        return
    found = [(outcome, item) for outcome in compared for item in outcome.divergences]
    if not found:
        tokens = sum(sum(outcome.stats.new_tokens) for outcome in compared)
        yield f"identical to plain  yes, {'all ' * (tokens > 1)}{counted(tokens, 'token')}"
        return
    rows = sum(len(outcome.result.sequences) for outcome in compared)
    lossless = all(outcome.stats.lossless for outcome in compared)
    meaning = (
        "retrieve_verify=partial is not lossless"
        if not lossless
        else f"{dtype} must not differ here: please report this"
        if promised
        else f"{dtype} rounds near-ties either way; --dtype float32 is identical"
    )
    yield f"identical to plain  no: {len(found)} of {counted(rows, 'row')} ({meaning})"
    for outcome, item in found:
        gap = "gap unknown" if item.gap is None else f"a gap of {item.gap:.2e} in the logits"
        total = len(outcome.result.sequences[item.row])
        yield (
            f"  {outcome.row_names[item.row]}: first at token {item.index + 1} of {total}, "
            f"{item.plain_token} became {item.speculative_token}, {gap}"
        )


def _speed(stats: Sequence[Stats]) -> float | None:
    return _ratio(sum(s.decode_tokens for s in stats), sum(s.decode_seconds for s in stats))


def _ratio(count: int, by: float) -> float | None:
    return count / by if count and by and math.isfinite(by) else None
