"""The arguments of ``python -m infer.decode``, and what follows from them alone."""

import argparse
from typing import Any

from longspec_jax.config import DEFAULT_TREE, PLAIN, TreeConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
EPILOG = """\
Without arguments the embedded demo model completes a held-out document of more than 8000 tokens.

A line of a --batch file is a JSON string, or an object with prompt, messages or input_ids and any of
max_new_tokens, temperature, top_k, top_p, seed and eos_token_id for its row.

Exit status: 0, 2 for a request that cannot be met, 1 for a failure while running.
"""


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    result = argparse.ArgumentParser(
        prog="python -m infer.decode",
        description="Decode with LongSpec: the target's own text, several tokens a pass.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_models(result)
    _add_prompts(result)
    _add_sampling(result)
    _add_output(result)
    return result


def _add_models(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("models")
    group.add_argument("--target", help="folder or hub id of the target; the demo if absent")
    group.add_argument("--draft", help="folder or hub id of its draft; plain decoding if absent")
    group.add_argument("--revision", help="version of the target on the hub")
    group.add_argument("--draft_revision", help="version of the draft on the hub")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPES.values(), *DTYPES],
        help="auto: bfloat16 on GPUs that have it, else float16; float32 on a CPU",
    )
    group.add_argument("--attention", help="attention implementation; automatic if absent")
    group.add_argument("--prefill_chunk", type=int, help="tokens of one prefill step")
    group.add_argument(
        "--draft_vocabulary",
        type=int,
        metavar="N",
        help="let the draft propose the N most frequent tokens only, by the table saved beside it "
        "(python -m train.vocabulary); the text is the same. All tokens if absent",
    )
    group.add_argument(
        "--draft_int8",
        action="store_true",
        help="let the draft read its weights and a copy of the LM head in 8 bits: half the bytes at "
        "every level of a tree; the text is the same",
    )
    group.add_argument(
        "--method",
        default="tree",
        choices=["tree", "chain", "plain"],
        help="chain: a single branch as deep as the tree; plain: no speculation",
    )
    group.add_argument(
        "--tree", type=widths, help="widths of the draft tree by level; 4,16,16,16,16 if absent"
    )
    group.add_argument(
        "--budget",
        type=int,
        help="nodes of the tree to verify, the root included: the best by the draft's own score; "
        f"{DEFAULT_TREE.budget} of the default tree, all of a tree that is named",
    )
    group.add_argument(
        "--adaptive",
        action="store_true",
        help="choose among the tree, a smaller one and plain decoding by what each turns out to emit "
        "a second: a draft that does not help costs next to nothing. Three programs to compile",
    )


def _add_prompts(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("prompts (one of these)").add_mutually_exclusive_group()
    group.add_argument("--prompt", help="text")
    group.add_argument("--prompt_file", action="append", help="text file; repeat for several runs")
    group.add_argument("--messages", help="chat messages: a JSON file, or the JSON itself")
    group.add_argument("--batch", metavar="FILE.jsonl", help="prompts to decode as one batch")
    group.add_argument("--all_prompts", action="store_true", help="every sample prompt of the demo")
    group.add_argument("--list", choices=["prompts"], help="list the sample prompts and stop")
    result.add_argument(
        "--prompt_style",
        choices=["native", "vicuna", "longspec"],
        help="chat format; with it, a text prompt becomes a user's message. native: the tokenizer's "
        "own; longspec: what the published drafts were trained with",
    )


def _add_sampling(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("generation")
    group.add_argument("--max_new_tokens", type=int, default=256)
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--top_p", type=float, default=1.0)
    group.add_argument("--top_k", type=int, default=0, help="0 keeps all tokens")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--ignore_eos", action="store_true", help="do not stop at stop tokens")


def _add_output(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("output")
    yes_no = argparse.BooleanOptionalAction
    group.add_argument(
        "--compare",
        action=yes_no,
        default=True,
        help="decode plainly as well: speed without speculation, and whether the text is the same",
    )
    group.add_argument(
        "--stream", action=yes_no, default=True, help="show text as it is generated (one prompt)"
    )
    group.add_argument(
        "--json", metavar="FILE", help="write the numbers and the text; - for stdout"
    )
    group.add_argument("--color", default="auto", choices=["auto", "always", "never"])
    group.add_argument(
        "--compilation_cache",
        metavar="DIR",
        help="where to keep compiled programs; off for nowhere",
    )
    group.add_argument("--traceback", action="store_true", help="show Python's traceback on errors")


def widths(text: str) -> tuple[int, ...]:
    """The widths of a tree, from ``4,16,16``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be widths separated by commas, such as 4,16,16,16,16"
        ) from None


def chosen_tree(arguments: argparse.Namespace) -> TreeConfig:
    """The tree that ``--method``, ``--tree`` and ``--budget`` describe."""
    if arguments.method == "plain":
        return PLAIN
    shape, budget = arguments.tree or DEFAULT_TREE.widths, arguments.budget
    if arguments.method == "chain":
        return TreeConfig((1,) * len(shape), budget)
    if arguments.tree is None and budget is None:
        return DEFAULT_TREE
    return TreeConfig(shape, budget)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generation options for all rows."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
    options = {name: getattr(arguments, name) for name in names}
    return {**options, "eos_token_id": []} if arguments.ignore_eos else options
