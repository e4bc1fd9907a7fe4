"""The work of :mod:`train.regenerate`: data, target and output file brought together.

The output has whole lines, in order, none of them twice. Every line names the row it was made of,
so that the last line says where to continue. What the rows depend on lies in a small file beside
it, and a run that differs in any of it is refused.
"""

import argparse
import contextlib
import fcntl
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from longspec_jax import LongSpec, files, make_mesh
from longspec_jax.embedded import DEMO_NAME, demo_drafts, demo_target
from longspec_jax.generation.endpoint import Endpoint
from longspec_jax.loading import load_endpoint
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_model
from longspec_jax.weights.model_files import read_config

from .answering import (
    IN_HAND,
    Answering,
    Conversation,
    Counts,
    EngineAnswers,
    Limits,
    Questions,
    ServerAnswers,
    is_text,
)
from .config import DataConfig
from .data.documents import BadRows, Turn
from .data.loading import Documents, data_digest, expand
from .data.tokens import load_tokenizer
from .fingerprint import differences, fingerprint, model_digest, tokenizer_digest

COUNTED = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "prefix_tokens", "dtype")
"""Options that the rows depend on as they are typed."""
BETWEEN = 5.0
"""Seconds between two lines of progress."""


class Output:
    """An output file, open for more rows; no other process may write it meanwhile."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        """Open a new file, or continue one; a line that was cut off is removed.

        Args:
          path: the file.
          settings: what its rows depend on, as JSON values by the names of their options.

        Raises:
          ValueError: if the file is there and of other settings, or not of this command.
          OSError: if it cannot be written.
        """
        self.path = path
        settings_file = path.with_name(f"{path.name}.settings")
        if path.exists() and path.stat().st_size:
            _check_same(path, settings_file, settings)
        else:
            files.replace(settings_file, f"{json.dumps(settings, indent=1)}\n".encode())
        self._file = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another process is writing {path}; wait for it to end") from error
        self.rows, self.next_row = self._mend()

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, which are on the disk when this returns."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        if not lines:
            return
        data = memoryview("".join(lines).encode())
        while data:  # The system may take less than it is given.
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())
        self.rows += len(lines)

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def _mend(self) -> tuple[int, int]:
        """Cut the file behind its last whole line; how many lines there are, and the next row."""
        count, end, last = 0, 0, b""
        with self.path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    count, end, last = count + 1, end + len(line), line
        self._file.truncate(end)
        if not count:
            return 0, 0
        try:
            return count, int(json.loads(last)["row"]) + 1
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"this command did not write the last line of {self.path}; remove the line, "
                "or name another --out"
            ) from error


def check_no_input(path: Path, inputs: Sequence[Path]) -> None:
    """Refuse to write where rows are read.

    Raises:
      ValueError: names the file.
    """
    for one in inputs:
        if path.resolve() == one.resolve() or (path.exists() and path.samefile(one)):
            raise ValueError(f"--out={path} is one of the --files; name another file")


def _check_same(path: Path, settings_file: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to continue rows that were made with other settings."""
    try:
        before = json.loads(settings_file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} exists and was not written by this command ({settings_file.name} is missing or"
            " damaged); name another --out"
        ) from error
    if changes := differences(before, settings):
        raise ValueError(
            f"{path} was written with other settings: {changes}; repeat them to continue it, or "
            "name another --out"
        )


def regenerate(arguments: argparse.Namespace) -> str:
    """Answer the rows of a data set; what came of it, in a sentence.

    Raises:
      ValueError, OSError: for a mistake, or data or a target that cannot be read.
    """
    if arguments.endpoint and (arguments.draft or arguments.tree or arguments.mesh):
        raise ValueError("--draft, --tree and --mesh are the server's with --endpoint; drop them")
    data = DataConfig.whole(arguments)
    out = files.writable(files.expanded(arguments.out), arguments.out, of_results=False)
    check_no_input(out, [Path(name) for name in expand(data.files)])
    is_demo, template = arguments.target == DEMO_NAME, _template(arguments.chat_template)
    source = demo_target() if is_demo else local_model(arguments.target, arguments.revision)
    limits = _limits(arguments, source)
    bad = BadRows(arguments.max_bad_rows, "--max_bad_rows")
    documents = Documents(data, bad, Questions(limits.prefix_tokens))
    used = template or load_tokenizer(source).chat_template
    rows = _checked(documents, source, used)
    output = Output(out, _settings(arguments, limits, data, source, used))
    try:
        if output.next_row >= rows:
            return f"{out} has {output.rows} rows and is complete"
        target, answerer = _answerer(arguments, source, limits.max_row_tokens)
        work = Answering(
            answerer=answerer,
            target=target,
            limits=limits,
            drawing={
                "temperature": arguments.temperature,
                "top_k": arguments.top_k,
                "top_p": arguments.top_p,
            },
            seed=arguments.seed,
            bad=bad,
            in_hand=IN_HAND * arguments.max_num_seqs,
            template=template,
        )
        # Bad rows have been counted.
        again = replace(documents, bad=BadRows(sys.maxsize))
        with contextlib.closing(work.answerer):
            return _run(work, again, rows, output)
    finally:
        output.close()


def _settings(
    arguments: argparse.Namespace,
    limits: Limits,
    data: DataConfig,
    source: Path,
    template: str | None,
) -> dict[str, Any]:
    """What the rows depend on, by the names of options where it has one."""
    return {
        **{f"--{name}": getattr(arguments, name) for name in COUNTED},
        "--max_row_tokens": limits.max_row_tokens,
        "the chat template": fingerprint({"template": template}),
        "the data": data_digest(data),
        "the target": model_digest(source),
        "the tokenizer": tokenizer_digest(source),
    }


def _run(work: Answering, documents: Iterable[list[Turn]], total: int, output: Output) -> str:
    """Answer the rows that are left of all, and print the progress."""
    left = islice(enumerate(documents), output.next_row, None)
    conversations = (Conversation(row, deque(turns)) for row, turns in left)
    started, counts, told = time.monotonic(), work.counts, (0, -BETWEEN)

    def tell(seconds: float) -> None:
        print(
            f"{output.rows} rows of {total}, {counts.answers} answers of {counts.tokens} tokens in "
            f"{seconds:.0f} s, {counts.tokens / max(seconds, 1e-9):.1f} tokens/s",
            file=sys.stderr,
            flush=True,
        )

    for rows in work.run(conversations):
        output.append(row.record() for row in rows)
        seconds = time.monotonic() - started
        if counts.answers > told[0] and seconds > told[1] + BETWEEN:
            told = counts.answers, seconds
            tell(seconds)
    if counts.answers > told[0]:
        tell(time.monotonic() - started)
    return _summary(work, output)


def _summary(work: Answering, output: Output) -> str:
    """What came of the rows of this run."""
    counts: Counts = work.counts
    room = f"--max_row_tokens={work.limits.max_row_tokens}"
    notes = {
        f"left out {counts.too_long} without room for an answer within {room}": counts.too_long,
        f"ended {counts.shortened} before a question without room within {room}": counts.shortened,
        f"left out {counts.looping} answers that repeat themselves": counts.looping,
        f"cut {counts.cut} at --max_new_tokens={work.limits.max_new_tokens}": counts.cut,
        work.bad.summary(): work.bad.count,
    }
    return "; ".join([f"{output.path} has {output.rows} rows", *filter(notes.get, notes)])


def _limits(arguments: argparse.Namespace, source: Path) -> Limits:
    """How long rows may be; the target sets the maximum."""
    most = target_config(read_config(source), "float32").max_positions
    limits = Limits(
        arguments.max_new_tokens, arguments.max_row_tokens or most, arguments.prefix_tokens
    )
    if limits.max_row_tokens > most:
        raise ValueError(
            f"--max_row_tokens={limits.max_row_tokens} is more than the target was made for; give "
            f"at most {most}"
        )
    if limits.longest_prompt < max(1, limits.prefix_tokens):
        raise ValueError(
            f"--max_row_tokens={limits.max_row_tokens} has no room for prompts beside "
            f"--max_new_tokens={limits.max_new_tokens}"
            + f" and --prefix_tokens={limits.prefix_tokens}" * bool(limits.prefix_tokens)
            + "; give fewer new tokens"
        )
    return limits


def _template(path: str | None) -> str | None:
    """The Jinja text of a file."""
    return None if path is None else files.expanded(path).read_text("utf-8")


def _checked(documents: Documents, source: Path, template: str | None) -> int:
    """The number of rows, all of which are checked before the target is loaded."""
    row = 0
    for row, turns in enumerate(documents, 1):
        if not template and not is_text(turns):
            raise ValueError(
                f"row {row} is a conversation, and the tokenizer of {source} has no chat template; "
                "give --chat_template=FILE, the Jinja template the target was trained with "
                "(Vicuna's is longspec_jax.generation.chat.VICUNA_TEMPLATE)"
            )
    return row


def _answerer(
    arguments: argparse.Namespace, source: Path, longest: int
) -> tuple[LongSpec | Endpoint, EngineAnswers | ServerAnswers]:
    """The target with what drafts for it, here or on a server, and who has it answer."""
    if arguments.endpoint:
        server = load_endpoint(arguments.endpoint, source, arguments.max_num_seqs)
        return server, ServerAnswers(server)
    spec = LongSpec.from_pretrained(
        source,
        draft=demo_drafts(arguments.draft or None),
        dtype=arguments.dtype,
        mesh=make_mesh(**arguments.mesh) if arguments.mesh else None,
    )
    return spec, EngineAnswers(spec, arguments.max_num_seqs, arguments.tree, longest)
