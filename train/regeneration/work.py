"""The work of :mod:`train.regenerate`: data, target and output brought together."""

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspec_jax import LongSpec, make_mesh
from longspec_jax.embedded import DEMO, DEMO_NAME, DRAFTS
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_folder
from longspec_jax.weights.json_files import read_json

from ..config import DataConfig
from ..data.bad_rows import BadRows
from ..data.fingerprint import fingerprint, tokenizer_digest
from ..data.loading import Documents, data_digest, expand, load_documents
from ..data.tokenizer import load_tokenizer
from ..fingerprint import model_digest
from .answering import Answering, Counts, Limits
from .conversation import Asking, Conversation, is_text
from .output import Output, check_no_input

COUNTED = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "prefix_tokens", "dtype")
"""Options that the rows depend on as they are typed."""


def regenerate(arguments: argparse.Namespace) -> str:
    """Do what the arguments say; what came of it, in a sentence.

    Raises:
      ValueError, OSError: for a mistake, or data or a target that cannot be read.
    """
    data = DataConfig.whole(arguments.files or "", arguments.hub or "", arguments.split)
    out = Path(arguments.out).expanduser()
    check_no_input(out, [Path(name) for name in expand(data.files)])
    source, template = _target(arguments), _template(arguments.chat_template)
    limits = _limits(arguments, source)
    bad = BadRows(arguments.max_bad_rows, "--max_bad_rows")
    documents = load_documents(data, Asking(limits.prefix_tokens), bad)
    tokenizer = load_tokenizer(source)
    _check_template(documents, source, template or tokenizer.chat_template)
    settings = _settings(arguments, limits, data, source, template or tokenizer.chat_template)
    output = Output(out, settings)
    try:
        if output.next_row >= len(documents):
            return f"{out} has {output.rows} rows and is complete"
        work = Answering(
            spec=_load(arguments, source),
            limits=limits,
            options={name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")},
            seed=arguments.seed,
            bad=bad,
            at_once=arguments.rows_at_once or 16 * arguments.row_slots,
            template=template,
            tree=arguments.tree,
        )
        return _run(work, documents, output)
    finally:
        output.close()


def _settings(
    arguments: argparse.Namespace, limits: Limits, data: DataConfig, source: Path, template: Any
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


def _run(work: Answering, documents: Documents, output: Output) -> str:
    """Answer the rows that are left, and tell of it as it goes on."""
    started, counts, told = time.monotonic(), work.counts, 0
    for rows in work.run(_conversations(documents, output.next_row)):
        output.append(row.record() for row in rows)
        if counts.answers > told:
            told, seconds = counts.answers, time.monotonic() - started
            print(
                f"{output.rows} rows of {len(documents)}, {told} answers of {counts.tokens} tokens "
                f"in {seconds:.0f} s, {counts.tokens / max(seconds, 1e-9):.1f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    return _summary(work, output)


def _conversations(documents: Documents, first: int) -> Iterator[Conversation]:
    """The rows from one on."""
    return (Conversation(row, deque(documents[row])) for row in range(first, len(documents)))


def _summary(work: Answering, output: Output) -> str:
    """What came of the rows of this run."""
    counts: Counts = work.counts
    room = f"--max_row_tokens={work.limits.max_row_tokens}"
    notes = {
        f"left out {counts.too_long} without room for an answer within {room}": counts.too_long,
        f"ended {counts.shortened} before a question without room within {room}": counts.shortened,
        f"cut {counts.cut} at --max_new_tokens={work.limits.max_new_tokens}": counts.cut,
        work.bad.summary(): work.bad.count,
    }
    said = [f"{output.path} has {output.rows} rows", *(note for note in notes if notes[note])]
    return "; ".join(said)


def _target(arguments: argparse.Namespace) -> Path:
    """The folder of the target."""
    if arguments.target == DEMO_NAME:
        return DEMO / "target"
    return local_folder(arguments.target, arguments.revision)


def _limits(arguments: argparse.Namespace, source: Path) -> Limits:
    """How long rows may be, which the target has a say in."""
    most = target_config(read_json(source / "config.json"), "float32").max_positions
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
    return None if path is None else Path(path).expanduser().read_text("utf-8")


def _check_template(documents: Documents, source: Path, template: Any) -> None:
    """Refuse conversations that nothing says how to write, before the target is loaded."""
    if template:
        return
    chats = (row for row, turns in enumerate(documents) if not is_text(turns))
    if (row := next(chats, None)) is not None:
        raise ValueError(
            f"row {row + 1} is a conversation, and the tokenizer of {source} has no chat template; "
            "give --chat_template=FILE, the Jinja template the target was trained with (Vicuna's "
            "is longspec_jax.generation.chat.VICUNA_TEMPLATE)"
        )


def _load(arguments: argparse.Namespace, source: Path) -> LongSpec:
    """The target and what drafts for it."""
    options: dict[str, Any] = {
        "draft": [DRAFTS.get(name, name) for name in arguments.drafter or ()] or None,
        "dtype": arguments.dtype,
        "mesh": make_mesh(**arguments.mesh) if arguments.mesh else None,
        "row_slots": arguments.row_slots,
    }
    return LongSpec.from_pretrained(source, **options)
