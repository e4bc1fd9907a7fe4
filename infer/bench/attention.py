"""How fast attention of tree nodes to a long prefix is, beside the alternatives and the rooflines.

Every case is one layer of a decode step: ``tokens`` queries attend to ``context`` cached slots and,
under a random tree mask, to each other. For each case many calls on distinct caches, together
larger than the GPU's second-level cache, run inside one compiled program in which every call waits
for the one before; several executions of the program are queued back to back. The time of a call is
the median over repetitions of that total divided by the number of calls, so that launch overhead
is excluded alike for our kernels and for the alternatives (torch runs in a CUDA graph).

The roofline of a case is ``max(bytes / bandwidth, operations / rate)``: bytes are queries, keys,
values and output once each, operations those of the two matmuls. Bandwidth and rate are measured in
the same run.
"""

import argparse
import concurrent.futures
import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from longspec_jax.cli import counted, settled

from .attention_candidates import (
    CANDIDATES,
    TORCH,
    Case,
    Operands,
    Refusal,
    compiled,
    torch_seconds,
)
from .models import check_memory
from .report import Report, run_header
from .timing import Roofline, announce, jax_seconds, measure_roofline

HEAD_WIDTH = 128
CPU_SECONDS = 5
"""A rough estimate for a program, to compile and time it."""


def main(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write the files."""
    # Torch needs its share of the memory that jax would otherwise take.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    cases = [
        Case(
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=HEAD_WIDTH,
            context=context,
            batch=batch,
            dtype=arguments.dtype,
        )
        for batch in arguments.batch
        for context in arguments.context
        for heads, kv_heads in arguments.heads
        for tokens in arguments.tokens
    ]
    for case in cases:
        words = f"{case.copies} caches of {case.context} tokens in {counted(case.batch, 'row')}"
        check_memory(words, case.copies * case.cache_bytes)
    if cpu:
        programs = len(cases) * len(arguments.implementation)
        work = f"{counted(len(cases), 'case')}, {counted(programs, 'program')} to compile"
        announce(work, CPU_SECONDS * programs)
    roofline = measure_roofline()
    method = (__doc__ or "").split("\n\n", 1)[1]
    header = run_header(jax.devices()[0].device_kind, method, **roofline.fields)
    with Report(header, arguments.json, arguments.chart) as report:
        for row in compare(cases, roofline, arguments.implementation):
            report.add(row, line(row))


def compare(
    cases: Sequence[Case], roofline: Roofline, implementations: Sequence[str]
) -> Iterable[dict[str, Any]]:
    """Time every implementation on every case; one that cannot run yields the reason.

    Cases of one batch and context are compiled together, on all cores, before one is timed:
    compilation beside a measurement would disturb it.
    """
    operands = Operands()
    for (batch, context), group in itertools.groupby(
        cases, lambda case: (case.batch, case.context)
    ):
        work = list(itertools.product(implementations, group))
        ours = [(name, case) for name, case in work if name in CANDIDATES]
        # A kernel that does not come back is then the one after the last line printed.
        print(f"batch {batch}, {context} cached tokens: compiling {len(ours)} programs", flush=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            found = pool.map(lambda item: compiled(item[1], CANDIDATES[item[0]]), ours)
            programs = dict(zip(ours, found, strict=True))
        for name, case in work:
            outcome = _timed(name, case, programs.get((name, case)), operands)
            if isinstance(outcome, Refusal):
                yield case.row(name, roofline, None, refusal=outcome.reason)
            else:
                yield case.row(name, roofline, outcome)


def _timed(name: str, case: Case, program: Any, operands: Operands) -> float | Refusal:
    """Seconds of one call, or why there are none."""
    if isinstance(program, Refusal):
        return program
    try:
        if name in TORCH:
            return torch_seconds(case, TORCH[name])
        arrays = operands.of(case, CANDIDATES[name].layout)
        return jax_seconds(functools.partial(program, *arrays)) / case.calls
    except Exception as error:  # An alternative that fails is a result, too.
        return Refusal.of(error)


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    shape = (
        f"{row['implementation']:11s} B={row['batch']} S={row['context']:6d} "
        f"{row['heads']}/{row['kv_heads']} T={row['tokens']:3d}"
    )
    if row["microseconds"] is None:
        return f"{shape}  -  {row['refusal']}"
    return (
        f"{shape} {row['microseconds']:9.1f} us {row['tb_per_s']:6.2f} TB/s "
        f"{row['tflop_per_s']:6.1f} TFLOP/s {row['percent_of_roof']:5.1f} %"
    )
