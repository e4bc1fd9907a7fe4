"""The LongSpec paper's Tables 1 and 4 at its acceptance lengths, beside its own figures.

Rounds are real and of random weights, behind a filled cache. How many tokens they accept is drawn
with the mean that the paper reports at temperature 0, so that tokens per second are measured at
that mean and are no product of other figures. The paper verifies all 69 nodes of its tree, we the
best 64, which keep 99 % of the accepted tokens (``infer.bench.kept_acceptance``); the last round of
a decode is cut, which makes the measured mean a little smaller still. Ours are of batch 1, in
bfloat16 where the hardware has it; the paper's are of float16 on an A100: speeds compare machines,
speed-ups compare methods. On either side they are over plain decoding with FlashDecoding.

Table 1: ``plain-eager`` is plain decoding with attention that writes out all scores, in float32
(the paper's Vanilla HF). ``magicdec`` drafts a chain of ``--gamma`` tokens with the target over 32
first and 1024 last tokens of its cache; a chain of 2 unless another is named, the only one with
which the paper reports gains: its rounds of 2.0 to 3.4 plain steps and its acceptance lengths below
3 are those of such a chain.
``longspec-chain`` and ``ngram`` have no acceptance length in the paper, so that only their rounds
are timed. ``round_over_plain`` is a round in plain steps, and so the tokens per pass from which it
pays; ``acceptance_length_of_tree`` the tokens per pass at which a method would be as fast as
``longspec-tree`` is at the paper's. The paper does not say how long its prompts are: ``context`` is
the middle of the range of Table 4 in which the mean of LongBench's task lies, by a rough count of
its tokens (``infer.bench.published``).

Table 4: LongSpec's tree at the middle of every range of prefill lengths. The paper's target time
stands beside ``verify_ms``, the target pass with LM head and draws, and its verify time beside
``rest_ms``, what draft and target pass leave of a round: walk, commit and bookkeeping. Draft and
target pass are timed in programs of their own (``infer.bench.parts``), where they may take a little
longer than in a round; then the rest is below zero. The paper's rows are LongChat-7B's, whose shape
is that of ``vicuna7b``.
"""

import argparse
import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from longspec_jax.config import DEFAULT_TREE, PLAIN, TreeConfig
from longspec_jax.decoding import engine
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.draft import Draft
from longspec_jax.drafters.ngram import NgramDraft
from longspec_jax.drafters.streaming import StreamingDraft

from ..tree_json import tree_fields
from ..wording import counted
from . import parts, published
from .arguments import PAPER_METHODS, settled
from .decode import LoopTime, compared, results, time_loop, time_part
from .decode_setting import Bench, Setting, rough_seconds, setting_bytes
from .kept_acceptance import kept_lengths
from .models import check_memory, random_model
from .paper_text import line, tables
from .progress import announce, step
from .report import Report, Row, run_header
from .shapes import SHAPES
from .simulated import simulated_decode
from .timing import measure_roof, rounded

CHAIN = TreeConfig((1, 1, 1, 1))
"""The chain of the LongSpec release."""
ANY = 2.0
"""Tokens per pass of rounds whose time alone is of interest; it does not depend on them."""
TREE = "longspec-tree"
CPU_COMPILE_SECONDS = 2
"""Of one program, which is most of what a small case takes; a rough estimate for two cores."""
PARTS = (parts.draft, parts.verify)


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


def all_methods(gamma: int) -> dict[str, Method]:
    """Every row of our Table 1; MagicDec drafts a chain of ``gamma`` tokens.

    Raises:
      ValueError: for a longer chain than is verified in one pass.
    """
    ngram = NgramDraft()
    try:
        drafted = TreeConfig((1,) * gamma)
    except ValueError as error:
        raise ValueError(f"--gamma={gamma}: {error}") from None
    methods = (
        Method(published.PLAIN, None, PLAIN),
        Method(published.EAGER, None, PLAIN, "reference"),
        Method(published.MAGICDEC, StreamingDraft(), drafted),
        Method(published.LONGSPEC, None, DEFAULT_TREE),
        Method(None, None, CHAIN),
        Method(None, ngram, ngram.default_trees.large[0]),
    )
    return dict(zip(PAPER_METHODS, methods, strict=True))


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write what was asked for."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    shapes = list(dict.fromkeys(arguments.shape))
    methods = all_methods(arguments.gamma)
    settings = [
        setting_of(arguments, shape, context, methods[name].tree)
        for shape in shapes
        for name, context in cases_of(arguments)
    ]
    for setting in settings:
        check_memory(
            f"{setting.shape} with {setting.context} cached tokens", setting_bytes(setting)
        )
    if cpu:
        seconds = sum(rough_seconds(setting, CPU_COMPILE_SECONDS) for setting in settings)
        announce(counted(len(settings), "case"), seconds)
    roof = measure_roof()
    header = run_header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        roof_tb_per_s=roof.bytes_per_s / 1e12,
        roof_tflop_per_s=roof.operations_per_s / 1e12,
    )
    with Report(header, arguments.json) as report:
        for shape in shapes:
            for row in Measured(arguments, shape).rows():
                report.add(row, line(row))
        for table in tables(report.rows):
            print(f"\n{table}")


def methods_of(arguments: argparse.Namespace) -> list[str]:
    """The methods of Table 1, plain decoding first."""
    named = {"plain", *arguments.methods}
    return [name for name in PAPER_METHODS if name in named]


def cases_of(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """Every method with every number of cached tokens that the tables need it at."""
    cases = []
    if "1" in arguments.tables:
        tasks, methods = published.TASKS.values(), methods_of(arguments)
        cases += [(name, context) for context in tasks for name in methods]
    if "4" in arguments.tables:
        contexts = [published.RANGES[name] for name in arguments.ranges]
        cases += [(name, context) for context in contexts for name in ("plain", TREE)]
    return list(dict.fromkeys(cases))


def setting_of(
    arguments: argparse.Namespace, shape: str, context: int, tree: TreeConfig, mean: float = 1.0
) -> Setting:
    """One row that decodes with a tree, ``mean`` tokens a pass with all of its nodes."""
    return Setting(
        *(shape, context, context, 1, tree, arguments.new_tokens),
        *(kept_lengths(mean, tree), arguments.repetitions, arguments.turns),
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
        self._methods, self._cases = all_methods(arguments.gamma), cases_of(arguments)
        self._model = random_model(SHAPES[shape])
        self._loops: dict[tuple[str, int, float], LoopTime] = {}
        self._programs = self._compiled()

    def rows(self) -> Iterator[Row]:
        """The rows of the tables, as they are measured."""
        if "1" in self._arguments.tables:
            for task in published.TASKS:
                yield from self._task(task)
        if "4" in self._arguments.tables:
            for name in self._arguments.ranges:
                yield self._range(name)

    def _compiled(self) -> dict[tuple[str, int], concurrent.futures.Future[Any]]:
        """The loop of every case, and the parts of the rounds that Table 4 takes apart.

        Nothing is compiled any more when this returns. What could not be compiled is raised where
        it is needed, behind the rows that come before.
        """
        ranges = self._arguments.ranges if "4" in self._arguments.tables else ()
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
        state, target = bench.state(drafter), bench.model.target
        if drafter.tree == PLAIN:
            yield name, bench.compiling(engine.decode, target, drafter, state=state)
        else:
            static = target, drafter, 0, bench.setting.lengths.edges
            yield name, bench.compiling(simulated_decode, *static, state=state)
        if takes_apart:
            for part in PARTS:
                program = jax.jit(part(target, drafter, self._arguments.turns))
                yield part.__name__, bench.compiling(program, state=state.rows)

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
            given = () if drafter.tree == PLAIN else (bench.setting.lengths.edges,)
            self._loops[key] = time_loop(bench, self._program(name, context), drafter, *given)
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
            if TREE in self._arguments.methods:
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
        rows = bench.state(drafter).rows
        times = {
            part.__name__: time_part(bench, self._program(part.__name__, context), rows)
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
