"""Have a target answer the questions of a data set, for its draft to learn from.

    python -m train.regenerate --target=TARGET --files='chats/*.jsonl' --out=regenerated.jsonl
    python -m train.run --config=NAME:sft --config.data.files=regenerated.jsonl

A draft has to guess the target's own text, which differs from text that others wrote. Rows may have
the formats of training data (messages, ShareGPT's conversations, the paper's fields), or a prompt.
System and user turns are kept, and the target answers every user turn. Its answers replace those of
the data. Of plain text the first --prefix_tokens are kept, and the target continues them.

Rows are written in the order of the data, as messages or text. Each has the number of its row in
the data, and whether its last answer ended within --max_new_tokens. An answer that did not ends its
row. A row ends before a question that leaves no room for an answer within --max_row_tokens, and
before an answer that repeats 16 tokens more than three times; it is left out if that is the first
one. --max_num_seqs, --draft and --tree do not change the rows, except for near-ties in 16 bits.

The same command continues where it was stopped. The exit status is 0, 1 for a target whose logits
are not finite, 2 for bad input, and 130 after Ctrl-C.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from longspec_jax import cli
from longspec_jax.checks import Whole
from longspec_jax.config import loading, sampling, serving

from .config import add_documents

ZERO_OR_MORE = cli.value(Whole(0))
DRAWING = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
"""Options of ``generate``; the seed of each answer is derived from the run's."""


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
    add = result.add_argument
    add_documents(result)
    add("--out", required=True, metavar="FILE.jsonl", help="where rows are written")
    text = "tokens of plain text rows that the target continues; 0 refuses such rows"
    add("--prefix_tokens", type=ZERO_OR_MORE, default=0, help=text)
    text = "rows that may be skipped because they hold no question or the template refuses them"
    add("--max_bad_rows", type=ZERO_OR_MORE, default=0, help=text)
    text = "Jinja file instead of the tokenizer's own template"
    add("--chat_template", metavar="FILE", help=text)
    text = (
        "proposes tokens, for speed: folder or hub id of a draft, or ngram; several propose into "
        "one tree; plain decoding if absent"
    )
    add("--draft", type=cli.path, action="append", help=text)
    add("--tree", type=cli.tree, help="what they propose in a round; the fastest if absent")
    text = f"devices: {cli.MESH_GRAMMAR}; one if absent"
    add("--mesh", type=cli.mesh, metavar="AXIS=N,...", help=text)
    text = "rows that are decoded at once"
    slots = replace(serving.OPTIONS["max_num_seqs"], default=8, about=text)
    cli.add_options(result, {"max_num_seqs": slots, "dtype": loading.OPTIONS["dtype"]})
    text = (
        "most tokens of a row with its answers, for which memory is taken; 16384 if absent, or the "
        "target's positions"
    )
    add("--max_row_tokens", type=cli.value(Whole(2)), help=text)
    drawing = {name: sampling.OPTIONS[name] for name in DRAWING}
    cli.add_options(result, drawing, max_new_tokens=1024)
    return result


if __name__ == "__main__":
    sys.exit(main())
