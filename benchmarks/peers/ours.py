"""Our own rows: the engine's rounds as ``python -m benchmarks decode`` times them, and real texts.

``ours`` has one order of sums, so that speculation changes no bit; ``ours-fastest`` has the fastest
kernels. A ``round`` is verified in the tree that the drafter names, or in the default one of 64
nodes; drafts are in 8 bits, the default next to a large target on a GPU.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from longspec_jax import PLAIN as NO_TREE
from longspec_jax import LongSpec
from longspec_jax.config.tree import DEFAULT_TREE

from .. import decode
from ..arguments import parser
from ..report import Row
from ..timing import step
from . import attention
from .rows import ATTENTION, DRAFT, PLAIN, REAL, ROUND, Job, text_row

PLAIN_BESIDE = "longspec"
"""The draft whose rows have the plain step, too: it is the same next to every draft."""


def main(path: str, *, batch_invariant: bool = True) -> None:
    """Measure a job: of ``round`` also plain steps, of ``plain`` only those."""
    job = Job.read(path)
    if job.what == REAL:
        texts(job)
        return
    if job.what == ATTENTION:
        attention.measure(job, "ours")
        return
    drafter = job.drafter or PLAIN_BESIDE
    kind, _, named = drafter.partition(", ")
    tree = named or str(DEFAULT_TREE)
    words = ["decode", "--shape", job.shape, "--draft", kind, "--tree", tree]
    words += ["--acceptance", str(job.tau), "--repetitions", str(job.repetitions)]
    words += ["--new_tokens", str(job.new_tokens), "--draft_option", "int8"]
    words += [f"--{'' if batch_invariant else 'no-'}batch_invariant"]
    words += ["--context", ",".join(map(str, job.contexts))]
    for batch in job.batches:  # Rows of a batch are kept if there is no time for the next.
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "decode.json"
            more = ["--batch", str(batch), "--json", str(file)]
            decode.main(parser().parse_args([*words, *more]))
            rows = json.loads(file.read_text())["rows"]
        for row in rows:
            plain, round_ = both(row, f"{kind}, {tree}")
            if job.what == PLAIN or drafter == PLAIN_BESIDE:
                job.add(plain)
            if job.what == ROUND:
                job.add(round_)


def both(row: Row, drafter: str) -> tuple[Row, Row]:
    """The plain step and the round of a row of ``benchmarks decode``."""
    place = {name: row[name] for name in ("shape", "context", "batch")} | {"temperature": 0.0}
    plain = {
        "what": "plain",
        "ms": row["plain_ms_per_token"],
        "tokens_per_second": row["plain_tokens_per_second"],
    }
    round_ = {
        "what": ROUND,
        "drafter": drafter,
        "tau": row["acceptance_length"],
        "ms": row["round_ms"],
        "tokens_per_second": row["tokens_per_second"],
    }
    return place | plain, place | round_


def texts(job: Job) -> None:
    """A row for every text and temperature."""
    step(f"ours: {job.drafter or 'plain'}, {job.shape}")
    draft = job.draft if job.drafter == DRAFT else "ngram"
    spec = LongSpec.from_pretrained(job.model, draft, dtype="bfloat16")
    longest = max(map(len, job.texts)) + job.new_tokens
    spec = dataclasses.replace(spec, expected_tokens=longest)
    for temperature in job.temperatures:
        for number, prompt in enumerate(job.texts):
            found = spec.generate(
                [list(prompt)],
                tree=NO_TREE if job.drafter is None else None,
                temperature=temperature,
                seed=[number],
                max_new_tokens=job.new_tokens,
                eos_token_id=[],
            )
            stats = found.stats
            accepted = stats.decode_tokens - sum(stats.target_passes)
            row = text_row(
                job,
                found.sequences[0],
                stats.decode_seconds,
                stats.prefill_seconds,
                None if job.drafter is None else accepted,
            )
            job.add(row | {"context": len(prompt), "text": number, "temperature": temperature})


if __name__ == "__main__":
    main(sys.argv[1], batch_invariant="fastest" not in sys.argv[2:])
