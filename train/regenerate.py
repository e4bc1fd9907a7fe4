"""Have a target answer the questions of a data set, for its draft to learn from.

    python -m train.regenerate --target=TARGET --files='chats/*.jsonl' --out=regenerated.jsonl
    python -m train.run --config=NAME:sft --config.data.files=regenerated.jsonl

A draft has to guess what its target will say, and text that others wrote is not that. Rows are read
as training reads them (messages, ShareGPT's conversations, the paper's fields), and prompts: system
and user turns are kept, and the target answers every user turn, its own earlier answers in place of
those in the data. Of plain text it keeps --prefix_tokens and goes on behind them.

Rows are written in the order of the data, as messages or text, with the number of the row they were
made of, and whether the last answer came to its end within --max_new_tokens; one that did not ends
its row. A row that has no room for an answer within --max_row_tokens is left out, or ends before
it, and is counted. The rows do not depend on --row_slots, --rows_at_once, --drafter and --tree, but
for near-ties in 16 bits.

The same command goes on where it was stopped. The exit status is 0, 1 for a target whose numbers
are not finite, 2 for bad input, and 75 (try again) after Ctrl-C.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from longspec_jax.checks import SAMPLING, Real, Whole
from longspec_jax.commands import command_name
from longspec_jax.config import TreeConfig
from longspec_jax.extras import missing_extra
from longspec_jax.mesh_argument import GRAMMAR, mesh_argument

COMMAND = command_name(__package__, "regenerate")
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 75
"""Exit statuses; the last is EX_TEMPFAIL of sysexits.h."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # It misses PyTorch; we do not.
    try:
        from .regeneration.work import regenerate

        print(regenerate(arguments))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        return _fail(missing)
    except FloatingPointError as error:  # A target that overflows.
        return _fail(str(error), FAILED)
    except (ValueError, OSError, NotImplementedError, MemoryError) as error:
        return _fail(str(error))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    result = argparse.ArgumentParser(
        prog=COMMAND,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_data(result)
    _add_models(result)
    _add_sampling(result)
    return result


def _add_data(result: argparse.ArgumentParser) -> None:
    data = result.add_mutually_exclusive_group(required=True)
    data.add_argument("--files", help="comma-separated json, jsonl, text or parquet files")
    data.add_argument("--hub", help="a data set on the hub, owner/name or owner/name/file")
    result.add_argument("--split", default="train", help="split of a hub data set")
    result.add_argument("--out", required=True, metavar="FILE.jsonl", help="where rows are written")
    result.add_argument(
        "--prefix_tokens",
        type=_whole(0),
        default=0,
        help="of plain text rows, kept before the target goes on; 0 refuses such rows",
    )
    result.add_argument(
        "--max_bad_rows",
        type=_whole(0),
        default=0,
        help="rows that may be skipped because they ask nothing or the template cannot write them",
    )


def _add_models(result: argparse.ArgumentParser) -> None:
    result.add_argument("--target", required=True, help="folder or hub id, with its tokenizer")
    result.add_argument("--revision", help="version of the target on the hub")
    result.add_argument(
        "--chat_template", metavar="FILE", help="Jinja file instead of the tokenizer's own template"
    )
    result.add_argument(
        "--drafter",
        action="append",
        help="what proposes tokens, for speed: folder or hub id of a draft, or ngram; of several "
        "the fastest here. Plain decoding if absent",
    )
    result.add_argument("--tree", type=_tree, help="of the first draft; the fastest if absent")
    result.add_argument(
        "--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"]
    )
    result.add_argument(
        "--mesh", type=mesh_argument, metavar="AXIS=N,...", help=f"devices: {GRAMMAR}"
    )
    result.add_argument(
        "--row_slots", type=_whole(1), default=8, help="rows that are decoded at once"
    )
    result.add_argument(
        "--rows_at_once",
        type=_whole(1),
        help="rows in hand, whose questions pass through the slots; what a killed run loses. 16 a "
        "slot if absent",
    )


def _add_sampling(result: argparse.ArgumentParser) -> None:
    result.add_argument(
        "--max_row_tokens",
        type=_whole(2),
        help="most tokens of a row with its answers; what the target was made for if absent",
    )
    defaults = {"max_new_tokens": 1024, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    notes = {
        "max_new_tokens": "most tokens of an answer",
        "temperature": "0 is greedy",
        "seed": "every answer has one of its own, which follows from it",
    }
    for name, value in defaults.items():
        result.add_argument(
            f"--{name}", type=_number(SAMPLING[name]), default=value, help=notes.get(name)
        )


def _number(rule: Whole | Real) -> Callable[[str], int | float]:
    """What reads a number that keeps a rule, for ``argparse``."""
    kind = int if isinstance(rule, Whole) else float

    def read(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            if rule.refusal(kind(text)) is None:
                return kind(text)
        words = rule.rule if isinstance(rule, Real) else rule.refusal(None)
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be {words}")

    return read


def _whole(least: int) -> Callable[[str], int | float]:
    return _number(Whole(least))


def _tree(text: str) -> TreeConfig:
    try:
        return TreeConfig.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _fail(message: str, status: int = BAD_INPUT) -> int:
    print(f"{COMMAND.removeprefix('python -m ')}: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
