"""The options of the benchmarks, declared apart from them: ``--help`` imports no jax.

A default may be one value for accelerators and another for CPUs, where the measurements made for
GPUs would take hours. :func:`settled` chooses once the machine is known; what the user names always
stands.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec_jax.checks import LARGEST_FLOAT32, Real, Whole
from longspec_jax.commands import command_name
from longspec_jax.config import ATTENTION, DEFAULT_TREE, TreeConfig
from longspec_jax.drafters.registry import LONGSPEC, NAMED, SMALL_LM, Kind
from longspec_jax.embedded import DEMO_NAME
from longspec_jax.mesh_argument import GRAMMAR as MESH_GRAMMAR
from longspec_jax.mesh_argument import mesh_argument

from ..boundary import Parser
from ..drafter_option import drafter_option
from ..number_argument import number_argument
from ..result_file import result_file
from ..tree_argument import GRAMMAR, drafting_tree, tree_argument
from . import published
from .files import chart_file, profile_folder
from .shapes import SHAPES
from .values import (
    DTYPES,
    comma_separated,
    head_counts,
    one_of,
)

STATIC, DYNAMIC = "transformers-static", "transformers-dynamic"
TORCH_CANDIDATES = ("torch-sdpa", "torch-flex", "flashinfer")
"""Those of ``attention`` that compute with torch tensors."""
ATTENTION_CANDIDATES = (
    "ours",
    "pallas",
    "mosaic",
    "triton",
    "xla",
    "cudnn",
    "xla-masked",
    *TORCH_CANDIDATES,
)
"""What ``attention`` compares; ours is the automatic choice."""

METHODS: tuple[str, ...] = (
    "small_lm",
    "small_lm_streaming",
    "small_lm_retrieval",
    "small_lm_opt_tree",
    "longspec",
    "longspec_retrieval",
    "longspec_opt_tree",
    "longspec_partial_passes",
)
"""What ``contexts`` compares: which part of a cache a draft reads."""
PAPER_METHODS = ("plain", "plain-eager", "magicdec", "longspec-tree", "longspec-chain", "ngram")
"""What ``paper`` compares."""
PAPER_TABLES = ("1", "4")
CACHES = ("full", "streaming", "retrieval", "target_retrieval")
"""What ``needle`` compares."""
CHAIN = TreeConfig((1, 1, 1))
"""A small tree: what a CPU, which computes node after node, is quickest with."""
COUNT = number_argument(Whole())
COUNTS = comma_separated(COUNT)
SEVERAL = number_argument(Whole(2))
"""New tokens: the first comes from the prefill, so that one alone is no decoding."""
NOT_NEGATIVE = number_argument(Real(0.0, LARGEST_FLOAT32, ">= 0 and finite"))
SHAPE_NAMES = comma_separated(one_of([*SHAPES]))


@dataclass(frozen=True)
class ByMachine:
    """A default that depends on the machine."""

    accelerator: Any
    cpu: Any

    def __str__(self) -> str:
        """For ``--help``."""
        return f"default {_typed(self.accelerator)}, on a CPU {_typed(self.cpu)}"


def settled(arguments: argparse.Namespace, cpu: bool) -> argparse.Namespace:
    """The arguments with the defaults of this machine."""
    values = {
        name: (value.cpu if cpu else value.accelerator) if isinstance(value, ByMachine) else value
        for name, value in vars(arguments).items()
    }
    return argparse.Namespace(**values)


KINDS: dict[str, Kind] = {"longspec": LONGSPEC, **NAMED, "small_lm": SMALL_LM}
"""Kinds of drafts that are measured."""


def parser(summaries: Mapping[str, str]) -> argparse.ArgumentParser:
    """The command's parser.

    Args:
      summaries: every benchmark's name and what it answers.
    """
    result = Parser(
        prog=command_name(__package__),
        description="Measure how fast decoding and its parts are, beside the alternatives.",
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="|".join(summaries))
    for name, summary in summaries.items():
        DECLARATIONS[name](commands.add_parser(name, help=summary, description=summary))
    return result


def attention(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench attention``."""
    heads = comma_separated(head_counts)
    all_heads = [(32, 32), (32, 8), (40, 8)]
    contexts = ByMachine([4096, 16384, 32768, 131072], [2048])
    _add(parser, "--tokens", COUNTS, ByMachine([1, 16, 48, 69, 128], [1, 16]), "tree nodes")
    _add(parser, "--heads", heads, ByMachine(all_heads, [(8, 2)]), "query/key-value heads")
    _add(parser, "--contexts", COUNTS, contexts, "cached tokens")
    _add(parser, "--batches", COUNTS, ByMachine([1, 8], [1]), "rows")
    parser.add_argument("--head-dim", type=COUNT, default=128)
    _add(parser, "--dtype", one_of(DTYPES), ByMachine("bfloat16", "float32"))
    everything = [*("ours", "mosaic", "cudnn", "xla-masked"), *TORCH_CANDIDATES]
    _add(
        parser,
        "--implementations",
        comma_separated(one_of(ATTENTION_CANDIDATES)),
        ByMachine(everything, ["ours", "xla-masked"]),
        f"some of {', '.join(ATTENTION_CANDIDATES)}; ours is the automatic choice",
    )
    parser.add_argument("--tiles", action="store_true", help="sweep our tiles instead; on a GPU")
    _add_outputs(parser)


def decode(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench decode``."""
    histogram = comma_separated(number_argument(Whole(0)))
    _add_setting(parser)
    parser.add_argument(
        "--ragged", action="store_true", help="rows of a batch from the whole context to half of it"
    )
    _add(
        *(parser, "--acceptance", NOT_NEGATIVE, ByMachine(3.57, 2.1)),
        "mean tokens emitted per round with all nodes of the tree verified; a budget such as @48 "
        "keeps what it kept on the demo",
    )
    parser.add_argument(
        "--histogram",
        type=histogram,
        help="recorded rounds by emitted tokens, instead, drawn as they are",
    )
    parser.add_argument(
        "--drafter",
        type=one_of([*KINDS]),
        default="longspec",
        help=f"one of {', '.join(KINDS)}, of random weights",
    )
    _add_tree(parser)
    parser.add_argument(
        "--drafter_option",
        type=drafter_option,
        action="append",
        metavar="NAME[=VALUE]",
        help="an option of the drafter's kind. longspec: int8 reads weights and LM head in 8 bits "
        "(here only where it is named), vocabulary=N proposes N tokens only",
    )
    _add(parser, "--new_tokens", SEVERAL, ByMachine(192, 48), "tokens of one repetition")
    _add(parser, "--repetitions", COUNT, ByMachine(3, 2))
    _add(parser, "--turns", COUNT, ByMachine(10, 3), "repeats of a separately timed part")
    _add_attention(parser)
    parser.add_argument("--prefill", type=COUNT, metavar="CHUNK", help="time a real prefill, too")
    parser.add_argument("--streaming", action="store_true", help="time rounds that are read, too")
    parser.add_argument("--adaptive", action="store_true", help="time adaptive decoding, too")
    parser.add_argument("--parts", action="store_true", help="take draft and verify further apart")
    parser.add_argument(
        "--profile",
        type=profile_folder,
        help="write kernel times and compiled programs to this folder",
    )
    _add_outputs(parser)


def match(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench match``."""
    temperatures = comma_separated(NOT_NEGATIVE)
    _add(parser, "--generations", COUNT, ByMachine(60, 2), "of every temperature")
    _add(parser, "--context", COUNT, ByMachine(4096, 512), "tokens of a prompt")
    _add(parser, "--new_tokens", SEVERAL, ByMachine(512, 48))
    parser.add_argument("--temperatures", type=temperatures, default=[0.0, 1.0])
    _add_tree(parser)
    parser.add_argument(
        "--dtype", type=one_of(DTYPES), default="bfloat16", help="float32 as a control"
    )
    _add_attention(parser)
    _add_outputs(parser, chart=False)


def drafters(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench drafters``."""
    kinds = comma_separated(one_of([*KINDS]))
    parser.add_argument("--drafters", type=kinds, help=f"some of {', '.join(KINDS)}; all if absent")
    _add(parser, "--context", COUNT, ByMachine(8192, 512), "most tokens of a prompt")
    _add(parser, "--new_tokens", SEVERAL, ByMachine(256, 48))
    temperatures = comma_separated(NOT_NEGATIVE)
    parser.add_argument("--temperatures", type=temperatures, default=[0.0, 1.0])
    parser.add_argument("--seed", type=number_argument(Whole(least=0)), default=0)
    _add_outputs(parser, chart=False)


def contexts(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench contexts``."""
    methods = comma_separated(one_of(METHODS))
    parser.add_argument(
        "--methods", type=methods, help=f"some of {', '.join(METHODS)}; all if absent"
    )
    lengths = ByMachine([2000, 4000, 8000, 15000], [2000])
    _add(parser, "--contexts", COUNTS, lengths, "tokens of a prompt")
    _add(parser, "--documents", COUNT, ByMachine(8, 1), "most rows of a batch")
    _add(parser, "--new_tokens", SEVERAL, ByMachine(256, 32))
    parser.add_argument("--temperatures", type=comma_separated(NOT_NEGATIVE), default=[0.0, 1.0])
    parser.add_argument("--seed", type=number_argument(Whole(least=0)), default=0)
    _add_outputs(parser, chart=False)


def needle(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench needle``."""
    depths = comma_separated(number_argument(Real(0.0, 1.0, "from 0 to 1")))
    parser.add_argument("--target", default=DEMO_NAME, help="folder or hub id; the demo if absent")
    parser.add_argument(
        "--drafter",
        default="demo_small_lm",
        help="folder or hub id of a small language model or a LongSpec draft; demo_small_lm or "
        "demo for those of the demo",
    )
    parser.add_argument(
        "--texts", type=Path, nargs="+", help="files around the needle; the demo's documents"
    )
    _add(parser, "--contexts", COUNTS, ByMachine([2000, 4000, 8000, 15000], [1000]), "tokens")
    parser.add_argument("--depths", type=depths, default=[0.1, 0.3, 0.5, 0.7, 0.9])
    _add(parser, "--needles", COUNT, ByMachine(4, 1), "documents of every depth")
    caches = comma_separated(one_of(CACHES))
    parser.add_argument(
        "--caches", type=caches, default=[*CACHES], help=f"some of {', '.join(CACHES)}"
    )
    parser.add_argument(
        "--working", type=COUNT, default=1024, help="tokens of the cache where not all is read"
    )
    parser.add_argument("--seed", type=number_argument(Whole(least=0)), default=0)
    _add_outputs(parser, chart=False)


def requests(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench requests``."""
    _add(parser, "--requests", SEVERAL, ByMachine(64, 12))
    _add(parser, "--row_slots", COUNT, ByMachine(8, 3), "rows that are decoded at once")
    _add(parser, "--shortest", SEVERAL, ByMachine(100, 20), "tokens of a prompt")
    _add(parser, "--longest", SEVERAL, ByMachine(15000, 800), "tokens of a prompt")
    _add(parser, "--new_tokens", SEVERAL, ByMachine(256, 32), "at most; at least a quarter")
    _add_tree(parser)
    parser.add_argument("--seed", type=number_argument(Whole(least=0)), default=0)
    _add_outputs(parser, chart=False)


def meshes(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench meshes``."""
    shapes = ByMachine("llama3-8b", "demo")
    _add(parser, "--shape", one_of([*SHAPES]), shapes, f"one of {', '.join(SHAPES)}")
    parser.add_argument(
        "--mesh",
        type=mesh_argument,
        action="append",
        metavar="AXIS=N,...",
        help=f"beside one device, as often as wanted: {MESH_GRAMMAR}. If absent, all of two "
        "devices",
    )
    _add(parser, "--context", COUNT, ByMachine(16000, 256), "tokens of the longest prompt")
    _add(parser, "--batch", COUNT, ByMachine(4, 2), "rows")
    _add(parser, "--new_tokens", SEVERAL, ByMachine(48, 16))
    _add_tree(parser)
    _add_outputs(parser, chart=False)


def paper(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench paper``."""
    _add(
        parser,
        "--shape",
        SHAPE_NAMES,
        ByMachine(["vicuna7b"], ["tiny"]),
        f"some of {', '.join(SHAPES)}",
    )
    tables = comma_separated(one_of(PAPER_TABLES))
    parser.add_argument("--tables", type=tables, default=[*PAPER_TABLES], help="1, 4 or both")
    methods = comma_separated(one_of(PAPER_METHODS))
    parser.add_argument(
        "--methods",
        type=methods,
        default=[*PAPER_METHODS],
        help=f"of table 1, beside plain: some of {', '.join(PAPER_METHODS)}; all if absent",
    )
    ranges, few = [*published.RANGES], [published.SHORT, published.LONG]
    _add(
        *(parser, "--ranges", comma_separated(one_of(ranges)), ByMachine(ranges, few)),
        "prefill lengths of table 4",
    )
    parser.add_argument(
        "--gamma", type=SEVERAL, default=2, help="tokens that MagicDec drafts; default 2"
    )
    _add(parser, "--new_tokens", SEVERAL, ByMachine(128, 48), "tokens of one repetition")
    _add(parser, "--repetitions", COUNT, ByMachine(2, 1))
    _add(parser, "--turns", COUNT, ByMachine(5, 1), "repeats of a separately timed part")
    _add_outputs(parser, chart=False)


def products(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench products``."""
    _add_shape(parser)
    parser.add_argument("--rows", type=COUNTS, default=[1, 16, 64])
    parser.add_argument("--int8", action="store_true", help="the products of a draft in 8 bits")
    _add_outputs(parser, chart=False)


def retrieval(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench retrieval``."""
    shares = comma_separated(
        number_argument(Real(0.0, 1.0, "above 0 and at most 1", includes_least=False))
    )
    shapes = ByMachine(["llama3-8b"], ["tiny"])
    _add(parser, "--shape", SHAPE_NAMES, shapes, f"some of {', '.join(SHAPES)}")
    _add(parser, "--context", COUNTS, ByMachine([32768, 131072], [1024]), "cached tokens")
    parser.add_argument("--batch", type=COUNT, default=1, help="rows")
    _add(parser, "--retrieve", COUNTS, ByMachine([4096], [256]), "tokens that partial passes see")
    _add(parser, "--sinks", number_argument(Whole(0)), ByMachine(32, 32), "of them first ones")
    _add(parser, "--recent", COUNT, ByMachine(512, 64), "of them last ones")
    parser.add_argument("--block", type=COUNT, default=32, help="tokens that are chosen together")
    _add(parser, "--chain", COUNTS, ByMachine([16], [8]), "most tokens verified in part")
    parser.add_argument(
        "--refresh", type=COUNT, default=1, help="full passes from one choice of blocks to the next"
    )
    parser.add_argument(
        "--end",
        type=tree_argument,
        nargs="+",
        metavar="TREE",
        help="what a full pass verifies behind the chain, cut with it to 64 nodes, such as 4,8, or "
        "none; several are measured one after the other; --tree if left out",
    )
    _add(
        *(parser, "--acceptance", NOT_NEGATIVE, ByMachine(3.5, 2.1)),
        "mean tokens of a partial round, and of a round without retrieval, with all nodes of "
        "--tree verified; a budget such as @48 keeps what it kept on the demo",
    )
    _add(
        *(parser, "--agreement", shares, ByMachine([0.9, 0.95, 0.97, 0.99], [0.9, 0.99])),
        "how often a full pass confirms a token of the chain, given the one before",
    )
    _add_tree(parser)
    parser.add_argument(
        "--drafter_option",
        type=drafter_option,
        action="append",
        metavar="NAME[=VALUE]",
        help="an option of the LongSpec draft: int8, vocabulary=N",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="with the cache in the host's memory, and plain decoding beside",
    )
    _add(parser, "--new_tokens", SEVERAL, ByMachine(1024, 48), "tokens of one repetition")
    _add(parser, "--repetitions", COUNT, ByMachine(3, 1))
    _add(parser, "--turns", COUNT, ByMachine(10, 2), "repeats of a separately timed part")
    _add_attention(parser)
    _add_outputs(parser, chart=False)


def transformers(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench transformers``."""
    _add_setting(parser)
    names = comma_separated(one_of((STATIC, DYNAMIC)))
    parser.add_argument("--implementations", type=names, default=[STATIC, DYNAMIC])
    _add(parser, "--new_tokens", COUNT, ByMachine(24, 8), "tokens of one repetition")
    parser.add_argument("--repetitions", type=COUNT, default=3)
    parser.add_argument("--prefill_chunk", type=COUNT, default=2048)
    parser.add_argument(
        "--device", type=one_of(("cuda", "cpu")), help="cuda where PyTorch sees it, else cpu"
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="the static step"
    )
    _add_outputs(parser)


def report(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench report``."""
    parser.add_argument("files", type=Path, nargs="+", help="result files")
    _add_outputs(parser)


DECLARATIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "attention": attention,
    "decode": decode,
    "contexts": contexts,
    "drafters": drafters,
    "match": match,
    "meshes": meshes,
    "needle": needle,
    "paper": paper,
    "products": products,
    "requests": requests,
    "retrieval": retrieval,
    "transformers": transformers,
    "report": report,
}


def _add(
    parser: argparse.ArgumentParser, option: str, kind: Any, default: ByMachine, words: str = ""
) -> None:
    """Declare an option whose default depends on the machine."""
    words = f"{words}; {default}" if words else str(default)
    parser.add_argument(option, type=kind, default=default, help=words)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    shapes = ByMachine(["vicuna7b"], ["demo"])
    _add(parser, "--shape", SHAPE_NAMES, shapes, f"some of {', '.join(SHAPES)}")


def _add_setting(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser)
    _add(parser, "--context", COUNTS, ByMachine([4096], [1024]), "cached tokens")
    parser.add_argument("--batch", type=COUNTS, default=[1], help="rows")


def _add_tree(parser: argparse.ArgumentParser) -> None:
    trees = ByMachine(DEFAULT_TREE, CHAIN)
    _add(parser, "--tree", drafting_tree, trees, f"what the draft proposes: {GRAMMAR}")


def _add_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention",
        type=one_of(ATTENTION),
        help=f"one of {', '.join(ATTENTION)}; automatic if absent",
    )


def _add_outputs(parser: argparse.ArgumentParser, chart: bool = True) -> None:
    parser.add_argument("--json", type=result_file, help="write header and rows to this file")
    if chart:
        parser.add_argument("--chart", type=chart_file, help="draw the rows into this PNG")
    parser.add_argument(
        "--traceback", action="store_true", help="show Python's traceback on errors"
    )


def _typed(value: Any) -> str:
    """A value as a user would type it."""
    if isinstance(value, list | tuple):
        separator = "/" if value and isinstance(value, tuple) and len(value) == 2 else ","
        return separator.join(map(_typed, value))
    return str(value)
