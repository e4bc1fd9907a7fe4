"""Have a target answer the questions of a data set, for its draft to learn from.

    python -m train.regenerate --target=TARGET --files='chats/*.jsonl' --out=regenerated.jsonl
    python -m train.run --config=NAME:sft --config.data.files=regenerated.jsonl

A draft has to guess the target's own text, which differs from text that others wrote. Rows may have
the formats of training data (messages, ShareGPT's conversations, the paper's fields), or a prompt.
System and user turns are kept, and the target answers every user turn. Its answers replace those of
the data. Of plain text the first --prefix_tokens are kept, and the target continues them.

Rows are written in the order of the data, as messages or text. Each has the number of its row in
the data, and whether its last answer ended within --max_new_tokens. An answer that did not ends its
row. A row ends before a question that leaves no room for an answer within --max_row_tokens; it is
left out if that is the first question. --row_slots, --rows_at_once, --draft and --tree do not
change the rows, except for near-ties in 16 bits.

The same command continues where it was stopped. The exit status is 0, 1 for a target whose logits
are not finite, 2 for bad input, and 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence

from longspec_jax import cli
from longspec_jax.checks import SAMPLING, Whole

from .config import add_documents

ZERO_OR_MORE = cli.number(Whole(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    return cli.run(lambda: _command(argv), argv)


def _command(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)
    from .regeneration import regenerate

    try:
        print(regenerate(arguments))
    except KeyboardInterrupt:
        cli.say("the same command continues from here")
        raise
    return cli.OK


def parser() -> cli.Parser:
    """The command's parser."""
    result = cli.Parser(prog=cli.command_name(__package__, "regenerate"), description=__doc__)
    add_documents(result)
    result.add_argument("--out", required=True, metavar="FILE.jsonl", help="where rows are written")
    result.add_argument(
        "--prefix_tokens",
        type=ZERO_OR_MORE,
        default=0,
        help="tokens of plain text rows that the target continues; 0 refuses such rows",
    )
    result.add_argument(
        "--max_bad_rows",
        type=ZERO_OR_MORE,
        default=0,
        help="rows that may be skipped because they hold no question or the template refuses them",
    )
    _add_model(result)
    _add_sampling(result)
    return result


def _add_model(result: argparse.ArgumentParser) -> None:
    result.add_argument(
        "--chat_template", metavar="FILE", help="Jinja file instead of the tokenizer's own template"
    )
    result.add_argument(
        "--draft",
        type=cli.path,
        action="append",
        help="proposes tokens, for speed: folder or hub id of a draft, or ngram; repeat to use the "
        "fastest of several; plain decoding if absent",
    )
    result.add_argument(
        "--tree", type=cli.tree, help="tree of the first draft; the fastest if absent"
    )
    result.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32"],
        help="dtype of weights and activations; auto takes what suits this device",
    )
    result.add_argument(
        "--mesh",
        type=cli.mesh,
        metavar="AXIS=N,...",
        help=f"devices: {cli.MESH_GRAMMAR}; one if absent",
    )
    result.add_argument("--row_slots", type=cli.COUNT, default=8, help="rows decoded at once")
    result.add_argument(
        "--rows_at_once",
        type=cli.COUNT,
        help="rows between reading and writing, which a killed run repeats; 16 times the slots if "
        "absent",
    )


def _add_sampling(result: argparse.ArgumentParser) -> None:
    result.add_argument(
        "--max_row_tokens",
        type=cli.number(Whole(2)),
        help="most tokens of a row with its answers; the target's max_positions if absent",
    )
    defaults = {"max_new_tokens": 1024, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    notes = {
        "max_new_tokens": "most tokens of an answer",
        "temperature": "0 is greedy",
        "top_p": "draw from the most probable tokens that together have this probability",
        "top_k": "draw from this many most probable tokens; 0 for all",
        "seed": "of the run; the seed of each answer is derived from it",
    }
    for name, value in defaults.items():
        result.add_argument(
            f"--{name}", type=cli.number(SAMPLING[name]), default=value, help=notes[name]
        )


if __name__ == "__main__":
    sys.exit(main())
