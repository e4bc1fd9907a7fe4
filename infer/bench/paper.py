"""The LongSpec paper's Tables 1 and 4 at its acceptance lengths, beside its own figures.

Rounds are real and of random weights, behind a filled cache. How many tokens they accept is drawn
with the mean that the paper reports at temperature 0, so that tokens per second are measured at
that mean. The paper verifies all 69 nodes of its tree, we the best 64, which keep 99 % of the
accepted tokens (:data:`KEPT`); the last round of a decode is cut, which makes the measured mean a
little smaller still. Ours are of batch 1, in
bfloat16 where the hardware has it; the paper's are of float16 on an A100: speeds compare machines,
speed-ups compare methods. On either side they are over plain decoding with FlashDecoding.

Table 1: ``plain-eager`` is plain decoding with attention that writes out all scores, in float32
(the paper's Vanilla HF). ``magicdec`` drafts a chain of 2 tokens with the target over 32 first
and 1024 last tokens of its cache: the paper's rounds of 2.0 to 3.4 plain steps and its acceptance
lengths below 3 are those of such a chain.
``longspec-chain`` and ``ngram`` have no acceptance length in the paper, so only their rounds are
timed. ``round_over_plain`` is a round in plain steps, which is also the tokens per forward from
which it pays. ``acceptance_length_of_tree`` is the tokens per forward at which a method is as fast
as ``longspec-tree`` at the paper's. The paper does not say how long its prompts are: ``context`` is
the middle of the range of Table 4 in which the mean of LongBench's task lies, by a rough count of
its tokens (``infer.bench.published``).

Table 4: LongSpec's tree at the middle of every range of prefill lengths. The paper's target time
stands beside ``verify_ms``, the target forward with LM head and draws, and its verify time beside
``rest_ms``, what draft and target forward leave of a round: accept, commit and bookkeeping. Draft
and target forward are timed in programs of their own, where they may take a little longer than in a
round; then the rest is below zero. The paper's rows are LongChat-7B's, whose shape is that of
``vicuna7b``.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from longspec_jax.cli import counted, settled
from longspec_jax.config import DEFAULT_TREE, PLAIN, TreeConfig
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.draft import Draft
from longspec_jax.drafters.ngram import NgramDraft
from longspec_jax.drafters.streaming import StreamingDraft

from ..output import tree_fields
from . import published
from .acceptance import AcceptanceLengths
from .arguments import PAPER_METHODS, SHAPES
from .charts import brief
from .decode import compared, results
from .models import check_memory, random_model
from .report import Report, Row, run_header
from .rounds import PARTS, Bench, Drawn, LoopTime, Setting
from .timing import announce, measure_roofline, rounded, step

KEPT = (3.4872 - 1) / (3.5112 - 1)
"""Share of the accepted draft tokens that the best 64 of the tree's 69 nodes keep: recorded of the
demo, docs/results/demo_trees_temperature1_h200.json."""
CHAIN = TreeConfig((1, 1, 1, 1))
"""The chain of the LongSpec release."""
ANY = 2.0
"""Tokens per forward of rounds whose time alone is of interest; it does not depend on them."""
TREE = "longspec-tree"
CPU_COMPILE_SECONDS = 2
"""Of one program, which is most of what a small case takes; a rough estimate for two cores."""


@dataclass(frozen=True)
class Method:
    """A way to decode."""

    paper: str | None
    """Its name in the paper's Table 1; None where it is not there."""
    draft: Draft | None
    """In the place of the LongSpec draft."""
    tree: TreeConfig
    attention: str | None = None
    """In the place of the automatic choice."""


def all_methods() -> dict[str, Method]:
    """Every row of our Table 1."""
    ngram = NgramDraft()
    methods = (
        Method(published.PLAIN, None, PLAIN),
        Method(published.EAGER, None, PLAIN, "reference"),
        Method(published.MAGICDEC, StreamingDraft(), TreeConfig((1, 1))),
        Method(published.LONGSPEC, None, DEFAULT_TREE),
        Method(None, None, CHAIN),
        Method(None, ngram, ngram.default_trees.large[0]),
    )
    return dict(zip(PAPER_METHODS, methods, strict=True))


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write the files."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    shapes = list(dict.fromkeys(arguments.shape))
    methods = all_methods()
    settings = [
        setting_of(arguments, shape, context, methods[name].tree)
        for shape in shapes
        for name, context in cases_of(arguments)
    ]
    for setting in settings:
        check_memory(
            f"{setting.shape} with {setting.context} cached tokens", setting.device_bytes()
        )
    if cpu:
        seconds = sum(setting.rough_seconds(CPU_COMPILE_SECONDS) for setting in settings)
        announce(counted(len(settings), "case"), seconds)
    roofline = measure_roofline()
    header = run_header(jax.devices()[0].device_kind, __doc__ or "", **roofline.fields)
    with Report(header, arguments.json) as report:
        for shape in shapes:
            for row in Measured(arguments, shape).rows():
                report.add(row, line(row))
        for table in tables(report.rows):
            print(f"\n{table}")


def methods_of(arguments: argparse.Namespace) -> list[str]:
    """The methods of Table 1, plain decoding first."""
    named = {"plain", *arguments.method}
    return [name for name in PAPER_METHODS if name in named]


def cases_of(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """Every method with every number of cached tokens that the tables need it at."""
    cases = []
    if "1" in arguments.table:
        tasks, methods = published.TASKS.values(), methods_of(arguments)
        cases += [(name, context) for context in tasks for name in methods]
    if "4" in arguments.table:
        contexts = [published.RANGES[name] for name in arguments.range]
        cases += [(name, context) for context in contexts for name in ("plain", TREE)]
    return list(dict.fromkeys(cases))


def setting_of(
    arguments: argparse.Namespace, shape: str, context: int, tree: TreeConfig, mean: float = 1.0
) -> Setting:
    """One row that decodes with a tree, ``mean`` tokens a forward with all of its nodes."""
    kept = 1 + KEPT * (mean - 1) if tree == DEFAULT_TREE else mean
    return Setting(
        *(shape, context, context, 1, tree, arguments.new_tokens),
        *(AcceptanceLengths.geometric(kept, tree), arguments.repetitions, arguments.turns),
    )


class Measured:
    """The programs of a shape, and what was timed of them: equal cases are timed once."""

    def __init__(self, arguments: argparse.Namespace, shape: str):
        """Draw the weights, and compile everything at once.

        Args:
          arguments: of the command, settled.
          shape: name of the target's shape.
        """
        step(f"{shape}: drawing the weights")
        self._arguments, self._shape = arguments, shape
        self._methods, self._cases = all_methods(), cases_of(arguments)
        self._model = random_model(SHAPES[shape])
        self._loops: dict[tuple[str, int, float], LoopTime] = {}
        self._programs = self._compiled()

    def rows(self) -> Iterator[Row]:
        """The rows of the tables, as they are measured."""
        if "1" in self._arguments.table:
            for task in published.TASKS:
                yield from self._task(task)
        if "4" in self._arguments.table:
            for name in self._arguments.range:
                yield self._range(name)

    def _compiled(self) -> dict[tuple[str, int], concurrent.futures.Future[Any]]:
        """The loop of every case, and the parts of the rounds that Table 4 takes apart.

        Nothing is compiled any more when this returns. What could not be compiled is raised where
        it is needed, behind the rows that come before.
        """
        ranges = self._arguments.range if "4" in self._arguments.table else ()
        apart = [published.RANGES[name] for name in ranges]
        begun: dict[tuple[str, int], concurrent.futures.Future[Any]] = {}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for name, context in self._cases:
                takes_apart = name == TREE and context in apart
                for program, compile_ in self._compiling(name, context, takes_apart):
                    begun[program, context] = pool.submit(compile_)
            step(f"{self._shape}: compiling {counted(len(begun), 'program')}")
        return begun

    def _compiling(
        self, name: str, context: int, takes_apart: bool
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What compiles the loop of a case, and the parts of its rounds if they are wanted."""
        bench, drafter = self._bench(name, context)
        yield name, bench.loop(drafter, *self._drawn(bench, drafter))
        if takes_apart:
            for part in PARTS:
                yield part.__name__, bench.part(part, drafter)

    def _drawn(self, bench: Bench, drafter: Any) -> tuple[Any, Any]:
        """How rounds accept, and the arrays that this needs."""
        if drafter.tree == PLAIN:
            return None, ()
        return Drawn(drafter.tree), bench.setting.lengths.edges

    def _program(self, name: str, context: int) -> Callable[..., Any]:
        return self._programs[name, context].result()

    def _bench(self, name: str, context: int, mean: float = 1.0) -> tuple[Bench, Any]:
        """A method with a cache of its own, and its drafter."""
        method, model = self._methods[name], self._model
        if method.attention:
            target = dataclasses.replace(model.target, attention=method.attention)
            model = dataclasses.replace(model, target=target)
        if method.draft:
            params = Params(model.params.target, method.draft.params)
            model = dataclasses.replace(model, draft=method.draft, params=params)
        setting = setting_of(self._arguments, self._shape, context, method.tree, mean)
        bench = Bench.prepare(setting, model)
        return bench, bench.drafter if method.tree.widths else NoDraft()

    def _loop(self, name: str, context: int, mean: float) -> LoopTime:
        """A whole decode at an acceptance length."""
        key = name, context, mean
        if key not in self._loops:
            step(f"{self._shape}, {context} cached tokens: timing {name} at {mean:g} per pass")
            bench, drafter = self._bench(*key)
            _, given = self._drawn(bench, drafter)
            self._loops[key] = bench.time_loop(self._program(name, context), drafter, given)
        return self._loops[key]

    def _task(self, task: str) -> Iterator[Row]:
        """Table 1: a row for every method."""
        context, model = published.TASKS[task], published.model_of(self._shape)
        table = published.TABLE_1[model]
        papers = {
            name: table[method.paper][task] if method.paper else None
            for name, method in self._methods.items()
        }

        def loop(name: str) -> LoopTime:
            paper = papers[name]
            return self._loop(name, context, paper.acceptance_length if paper else ANY)

        plain, paper_plain = loop("plain"), table[published.PLAIN][task]
        for name in methods_of(self._arguments):
            paper, found = papers[name], compared(plain, loop(name))
            if paper is None:  # Of its acceptance nothing is known, and so nothing of its speed.
                found |= dict.fromkeys(("acceptance_length", "tokens_per_second", "speed_up"))
            if TREE in self._arguments.method:
                tree, round_ms = loop(TREE), found["round_ms"]
                level = tree.emitted / tree.seconds * round_ms / 1e3
                found["acceptance_length_of_tree"] = rounded(level)
            yield {
                **{"table": 1, "shape": self._shape, "task": task, "context": context},
                **{"method": name, **tree_fields(self._methods[name].tree), **found},
                **{"paper_model": model, "paper_method": self._methods[name].paper},
                "paper_acceptance_length": paper and paper.acceptance_length,
                "paper_tokens_per_second": paper and paper.tokens_per_second,
                "paper_speed_up": paper and rounded(paper.over(paper_plain)),
            }

    def _range(self, name: str) -> Row:
        """Table 4: the row of a range of prefill lengths."""
        context, paper = published.RANGES[name], published.TABLE_4[name]
        plain = self._loop("plain", context, 1.0)
        loop = self._loop(TREE, context, paper.acceptance_length)
        bench, drafter = self._bench(TREE, context, paper.acceptance_length)
        step(f"{self._shape}, {context} cached tokens: timing the parts of a round")
        times = {
            part.__name__: bench.time_part(self._program(part.__name__, context), drafter)
            for part in PARTS
        }
        fields = dataclasses.asdict(paper)
        return {
            **{"table": 4, "shape": self._shape, "range": name, "context": context},
            **{"method": TREE, **tree_fields(self._methods[TREE].tree)},
            **results(bench.setting, plain, loop, times),
            **{"paper_model": published.TABLE_4_MODEL, "paper_method": published.LONGSPEC},
            **{f"paper_{field}": value for field, value in fields.items()},
        }


def line(row: Row) -> str:
    """A row as it comes."""
    what = row["task"] if row["table"] == 1 else f"prefill {row['range']}"
    words = (
        f"{row['shape']} S={row['context']} {what}, {row['method']}: round {row['round_ms']} ms, "
        f"{row['round_over_plain']} plain steps"
    )
    if row["speed_up"] is None:
        return words
    return (
        f"{words}; {row['tokens_per_second']} tokens/s at {row['acceptance_length']} tokens per "
        f"pass, {row['speed_up']} times plain"
    )


def tables(rows: Iterable[Row]) -> Iterator[str]:
    """The tables with the paper's figures and ours, one for every shape and task."""
    for (number, shape, task), group in itertools.groupby(
        rows, lambda row: (row["table"], row["shape"], row.get("task"))
    ):
        of_table = list(group)
        lines = _table_1(shape, task, of_table) if number == 1 else _table_4(shape, of_table)
        yield "\n".join(lines)


ONE = "{:14} {:>4} {:>6} {:>5} | {:>6} {:>5} {:>6} {:>5}"


def _table_1(shape: str, task: Any, rows: list[Row]) -> Iterator[str]:
    model, context = rows[0]["paper_model"], rows[0]["context"]
    yield f"Table 1, {task}, temperature 0"
    yield f"left: the paper's {model}; right: {shape}, {context} tokens"
    yield ONE.format("", "tau", "tok/s", "gain", "tok/s", "gain", "ms", "level")
    for row in rows:
        yield ONE.format(
            row["method"],
            *(_fixed(row["paper_acceptance_length"]), _brief(row["paper_tokens_per_second"])),
            *(_fixed(row["paper_speed_up"]), _brief(row["tokens_per_second"])),
            *(_fixed(row["speed_up"]), _fixed(row["round_ms"]), _fixed(row["round_over_plain"])),
        )
    yield "gain: over plain. ms: of a round. level: tokens per forward"
    yield "from which a round of so many ms pays."


FOUR = "{:8} {:6} {:>6} {:>5} {:>6} {:>7} {:>7} {:>5}"


def _table_4(shape: str, rows: list[Row]) -> Iterator[str]:
    yield "Table 4, GovReport, temperature 0, times in ms"
    yield f"paper: {rows[0]['paper_model']}; ours: {shape}"
    yield FOUR.format("prefill", "", "tok/s", "tau", "draft", "target", "verify", "gain")
    for row in rows:
        paper = {
            name.removeprefix("paper_"): row[name] for name in row if name.startswith("paper_")
        }
        yield _range(row["range"], "paper", paper, "target_ms", "verify_ms")
        yield _range(row["context"], "ours", row, "verify_ms", "rest_ms")
    yield "target: the target forward; verify: what is left of a round."


def _range(prefill: Any, whose: str, row: Row, target: str, verify: str) -> str:
    return FOUR.format(
        *(prefill, whose, _brief(row["tokens_per_second"]), _fixed(row["acceptance_length"])),
        *(_fixed(row["draft_ms"]), _fixed(row[target]), _fixed(row[verify])),
        _fixed(row.get("speed_up")),
    ).rstrip()


def _brief(value: float | None) -> str:
    return "-" if value is None else brief(value)


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
