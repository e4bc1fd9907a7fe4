"""The arguments of ``python -m infer.decode``, and what follows from them alone."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import longspec_jax
from longspec_jax.checks import SAMPLING, Whole
from longspec_jax.commands import command_name
from longspec_jax.config import ATTENTION
from longspec_jax.drafters.registry import NAMED
from longspec_jax.embedded import DEMO, DEMO_DRAFTERS, DEMO_NAME, DRAFTS
from longspec_jax.mesh_argument import GRAMMAR as MESH_GRAMMAR
from longspec_jax.mesh_argument import mesh_argument

from .boundary import Parser
from .drafter_option import drafter_option
from .number_argument import number_argument
from .prompt_files import Prompt, check_text, read_batch, read_messages, read_prompt_file
from .tree_argument import GRAMMAR, tree_argument

LONGEST_PATH = 4096
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DRAFTER_HELP = (
    "Given several times, what turns out fastest on this machine runs, and a --tree is the first "
    "one's. Plain decoding if absent"
)
EPILOG = """\
Without arguments the embedded demo model completes a held-out document of more than 8000 tokens.

A file named - is standard input.

A line of a --batch file is a JSON string, or an object with prompt, messages or input_ids and any
of max_new_tokens, temperature, top_k, top_p, seed and eos_token_id for its row.

Exit status: 0, 2 for a request that cannot be met, 1 for a failure while running, 130 if
interrupted: what was decoded until then is shown and, with --json, written.
"""


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    result = Parser(
        prog=command_name(__package__, "decode"),
        description="Decode with LongSpec: the target's own text, several tokens per pass.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"longspec_jax {longspec_jax.__version__}"
    result.add_argument("--version", action="version", version=version)
    _add_trees(add_models(result, DRAFTER_HELP))
    _add_prompts(result)
    _add_sampling(result)
    _add_output(result)
    return result


def add_models(result: argparse.ArgumentParser, drafter_help: str) -> Any:
    """Add what names models and says how they are loaded; returns the group of options."""
    group = result.add_argument_group("models")
    group.add_argument(
        "--target",
        type=path_argument,
        help="folder or hub id of the target; demo, or none, for the demo",
    )
    group.add_argument(
        "--drafter",
        type=path_argument,
        action="append",
        metavar="DRAFT",
        help="what proposes tokens: folder or hub id of a draft made for the target, "
        f"{' or '.join(NAMED)}, which need no weights, and for the demo {' or '.join(DRAFTS)}. "
        f"{drafter_help}",
    )
    group.add_argument(
        "--drafter_option",
        type=drafter_option,
        action="append",
        metavar="NAME[=VALUE]",
        help="an option of the draft's kind; none changes the text. LongSpec drafts: int8 reads "
        "weights and LM head in 8 bits, the default for large targets on GPUs; "
        "vocabulary=N proposes the N most frequent tokens only, by the table saved beside the "
        "draft (python -m train.vocabulary). LongSpec drafts and small "
        "language models: working=1024 reads that many tokens of a long cache, in chunks that the "
        "target attends to (SpecExtend), with refresh=0 its first and last ones. Every kind: "
        "retrieve=N has the target check rounds of the draft over N tokens of its cache first, "
        "among them the best blocks for its last queries; --tree is then the chain that this "
        "yields, and retrieve_tree=4,16,16 the draft's own tree (docs/retrieval.md)",
    )
    group.add_argument("--revision", type=word_argument, help="version of the target on the hub")
    group.add_argument(
        "--drafter_revision", type=word_argument, help="version of the draft on the hub"
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPES.values(), *DTYPES],
        help="auto: bfloat16 on GPUs that have it, else float16; float32 on a CPU, and for the "
        "demo",
    )
    group.add_argument(
        "--attention",
        type=word_argument,
        choices=ATTENTION,
        help="attention implementation; automatic if absent",
    )
    group.add_argument(
        "--prefill_chunk", type=number_argument(Whole()), help="tokens of one prefill step"
    )
    group.add_argument(
        "--mesh",
        type=mesh_argument,
        metavar="AXIS=N,...",
        help=f"devices to spread the models over: {MESH_GRAMMAR}. tp: heads, MLP width "
        "and vocabulary; data: rows; fsdp: rows and weights. One device if absent",
    )
    group.add_argument(
        "--row_slots",
        type=number_argument(Whole()),
        help="rows that are decoded at once: those of a larger --batch wait for a slot, and each "
        "prompt is prefilled between the rounds of the others. All rows if absent",
    )
    group.add_argument(
        "--offload",
        action="store_true",
        help="keep the target's cache in the host's memory, for contexts that the device has no "
        "room for; every pass takes as long as moving the cache does, so let it verify much "
        "(docs/retrieval.md)",
    )
    return group


def _add_trees(group: Any) -> None:
    group.add_argument(
        "--tree",
        type=tree_argument,
        help=f"what the draft proposes in a round: {GRAMMAR}. none: plain decoding. Without "
        "--tree, what turns out fastest on this machine, which may be none",
    )
    group.add_argument(
        "--adaptive",
        action="store_true",
        help="choose among the tree, a smaller one and plain decoding by what each turns out to "
        "emit per second: a draft that does not help costs next to nothing. Several programs to "
        "compile",
    )


def _add_prompts(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("prompts (one of these)").add_mutually_exclusive_group()
    group.add_argument("--prompt", help="text")
    group.add_argument(
        "--prompt_file",
        type=path_argument,
        action="append",
        help="text file; repeat for several runs",
    )
    group.add_argument(
        "--messages", type=word_argument, help="chat messages: a JSON file, or the JSON itself"
    )
    group.add_argument(
        "--batch", type=path_argument, metavar="FILE.jsonl", help="prompts to decode as one batch"
    )
    group.add_argument("--all_prompts", action="store_true", help="every sample prompt of the demo")
    group.add_argument("--list", choices=["prompts"], help="list the sample prompts and stop")
    result.add_argument(
        "--prompt_style",
        choices=["native", "vicuna", "longspec"],
        help="chat format; with it, a text prompt becomes a user's message. native: the "
        "tokenizer's own; longspec: what the published drafts were trained with",
    )


def _add_sampling(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("generation")
    defaults = {"max_new_tokens": 256, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    notes = {
        "temperature": "0 is greedy",
        "top_k": "0 keeps all tokens",
        "top_p": "1 keeps all tokens",
    }
    for name, value in defaults.items():
        kind = number_argument(SAMPLING[name])
        group.add_argument(f"--{name}", type=kind, default=value, help=notes.get(name))
    group.add_argument("--ignore_eos", action="store_true", help="do not stop at stop tokens")


def _add_output(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("output")
    yes_no = argparse.BooleanOptionalAction
    group.add_argument(
        "--compare",
        action=yes_no,
        help="decode plainly as well, unless --no-compare: speed without speculation, and whether "
        "the text is the same",
    )
    group.add_argument(
        "--stream",
        action=yes_no,
        help="show text as it is generated, unless --no-stream; a batch is shown when it is done",
    )
    group.add_argument(
        "--json",
        type=path_argument,
        metavar="FILE",
        help="write the numbers and the text; - for stdout",
    )
    group.add_argument("--color", default="auto", choices=["auto", "always", "never"])
    group.add_argument(
        "--compilation_cache",
        type=path_argument,
        metavar="DIR",
        help="where to keep compiled programs and what trees turned out to cost; off for nowhere",
    )
    group.add_argument("--traceback", action="store_true", help="show Python's traceback on errors")


def word_argument(text: str) -> str:
    """Text that is not empty, for ``argparse``."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty; leave the option out instead")
    return text


def path_argument(text: str) -> str:
    """A file or folder, ``~`` for the home as in a shell."""
    return str(Path(text).expanduser()) if word_argument(text).startswith("~") else text


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generation options for all rows."""
    options = {name: getattr(arguments, name) for name in SAMPLING}
    return {**options, "eos_token_id": []} if arguments.ignore_eos else options


def row_options(arguments: argparse.Namespace, row: Prompt) -> dict[str, Any]:
    """The options of a row: its own win, and the command's filters hold only where it draws."""
    merged = {**sampling_options(arguments), **row.options}
    return merged if merged["temperature"] > 0 else {**merged, "top_k": 0, "top_p": 1.0}


def is_demo(arguments: argparse.Namespace) -> bool:
    """Whether the target is the demo's."""
    return arguments.target in (None, DEMO_NAME)


def has_draft(arguments: argparse.Namespace) -> bool:
    """Whether there is a draft to speculate with."""
    return arguments.drafter is not None or is_demo(arguments)


def drafters(arguments: argparse.Namespace) -> list[str]:
    """What proposes tokens: as it is named, and the demo's own for the demo without a name."""
    return arguments.drafter or ([*DEMO_DRAFTERS] if is_demo(arguments) else [])


def named_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts the arguments name, read and checked; none if they leave it to the demo."""
    if arguments.prompt is not None:
        return [Prompt("prompt", check_text(arguments.prompt, "--prompt"))]
    if arguments.prompt_file:
        return [read_prompt_file(path) for path in arguments.prompt_file]
    if arguments.messages:
        return [Prompt("messages", read_messages(arguments.messages))]
    return read_batch(arguments.batch) if arguments.batch else []


def inputs(arguments: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Every file and folder that is read, with the option that names it."""
    for option in ("prompt_file", "messages", "batch", "target", "drafter"):
        value = getattr(arguments, option)
        for path in value if isinstance(value, list) else [value]:
            if path is not None and len(path) < LONGEST_PATH:  # Messages may be the JSON itself.
                yield f"--{option}", Path(path)
    if is_demo(arguments):
        for path in (DEMO / "target", DEMO / "draft", *DEMO.glob("prompts/*.txt")):
            yield "the demo", path
