"""The options of the benchmarks, declared apart from them: ``--help`` imports no jax.

A default may be one value for accelerators and another for CPUs, where the measurements made for
GPUs would take hours (:class:`longspec_jax.cli.ByMachine`).
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspec_jax import cli
from longspec_jax.checks import LARGEST_FLOAT32, Real, Whole
from longspec_jax.cli import COUNT, ByMachine, one_of, several
from longspec_jax.config.known import TARGETS, TINY
from longspec_jax.config.names import ATTENTION, KV_DTYPES
from longspec_jax.config.sampling import rule
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import DEFAULT_TREE, TreeConfig
from longspec_jax.drafters.registry import DFLASH, EAGLE3, LONGSPEC, NAMED, PARALLEL, SMALL_LM, Kind
from longspec_jax.embedded import DEMO, DEMO_NAME
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.json_files import read_json

from . import shapes

SHAPES: dict[str, TargetConfig] = {
    "tiny": TINY,
    "demo": target_config(read_json(DEMO / "target" / "config.json"), "float32"),
    **{name: known.config for name, known in TARGETS.items()},
    **shapes.SHAPES,
}
"""Shapes by name. ``demo`` is the embedded target's; ``tiny`` has two layers and shows that a
benchmark runs."""
KINDS: dict[str, Kind] = {
    "longspec": LONGSPEC,
    **NAMED,
    "small_lm": SMALL_LM,
    "eagle3": EAGLE3,
    "dflash": DFLASH,
    "parallel": PARALLEL,
}
"""Kinds of drafts that are measured with random weights."""
GROUPS = {"fp8": 0, "fp8-blocks": 128, "w4a16": 128}
"""Inputs that share a scale, by how a quantised target is stored; all if 0."""
EXPERTS = "mxfp4"
"""How gpt-oss's experts are stored, beside whole weights."""
WEIGHTS = ("whole", "one-order", "int8", *GROUPS)
"""How the weights of matmuls are stored; those of a draft are in 8 bits or whole. Whole ones may be
multiplied in one order."""
DTYPES = ("float32", "bfloat16", "float16")
FLASHINFER = "flashinfer"
ATTENTION_CANDIDATES = (
    *("ours", "pallas", "mosaic", "triton", "xla", "cudnn", "xla-masked", FLASHINFER),
)
"""What ``attention`` compares; ours is the automatic choice."""
CHAIN = TreeConfig((1, 1, 1))
"""A small tree: the fastest on a CPU, which computes node after node."""
MATCHED_TREES = (
    TreeConfig((4, 16, 16, 16, 16), 64),
    TreeConfig((4, 16, 16, 16, 16)),
    TreeConfig((4, 8, 8, 8), 16),
    TreeConfig((1,) * 6),
)
"""Trees of 64, 69 and 16 nodes, and a chain."""
SEVERAL_TOKENS = cli.number(Whole(2))
"""New tokens: the first comes from the prefill, so that one alone is no decoding."""
ACCEPTANCE = cli.number(Real(0.0, LARGEST_FLOAT32, ">= 0 and finite"))


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    result = cli.Parser(
        prog=cli.command_name(__package__),
        description="Measure how fast decoding and its parts are, beside the alternatives.",
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="|".join(BENCHMARKS))
    for name, (_, summary, declare) in BENCHMARKS.items():
        declare(commands.add_parser(name, help=summary, description=summary))
    return result


def _attention(parser: argparse.ArgumentParser) -> None:
    heads = ByMachine([(32, 32), (32, 8), (40, 8)], [(8, 2)])
    everything = ["ours", "mosaic", "cudnn", "xla-masked", FLASHINFER]
    _add_several(parser, "--tokens", COUNT, ByMachine([1, 16, 48, 69, 128], [1, 16]), "tree nodes")
    _add_several(parser, "--heads", head_counts, heads, "query/key-value heads, such as 32/8")
    _add_several(
        *(parser, "--context", COUNT, ByMachine([4096, 16384, 32768, 131072], [2048])),
        "cached tokens",
    )
    _add_several(parser, "--batch", COUNT, ByMachine([1, 8], [1]), "rows")
    _add_dtype(parser)
    _add_several(
        *(parser, "--implementation", one_of(ATTENTION_CANDIDATES)),
        ByMachine(everything, ["ours", "xla-masked"]),
        f"any of {', '.join(ATTENTION_CANDIDATES)}",
    )
    _add_outputs(parser)


def _decode(parser: argparse.ArgumentParser) -> None:
    _add_setting(parser)
    parser.add_argument(
        "--acceptance",
        type=ACCEPTANCE,
        default=ByMachine(3.545, 2.1),
        help="mean tokens emitted per round, the bonus included; the default is the paper's 3.57 "
        "of 69 nodes",
    )
    _add_weights(parser)
    parser.add_argument(
        "--draft",
        type=draft_source,
        default="longspec",
        help=f"kind of the draft, of random weights: {', '.join(KINDS)}; or the folder of a draft "
        "for this shape",
    )
    _add_tree(parser)
    parser.add_argument(
        "--draft_option",
        **several(cli.draft_option),
        metavar="NAME[=VALUE]",
        help="an option of the draft's kind. longspec: int8 reads weights and LM head in 8 bits "
        "(here only where it is named), vocabulary=N proposes N tokens only",
    )
    _add_new_tokens(parser, ByMachine(192, 48), "tokens of one repetition")
    _add_repetitions(parser, ByMachine(3, 2))
    _add_same_bits(parser)
    parser.add_argument(
        "--kv_dtype", choices=KV_DTYPES, help="of the cache; as activations if absent"
    )
    parser.add_argument(
        "--turns", type=COUNT, default=ByMachine(10, 3), help="repeats of a separately timed part"
    )
    parser.add_argument(
        "--prefill",
        type=COUNT,
        metavar="TOKENS",
        help="also time the target's prefill of the context, in chunks of this many tokens",
    )
    parser.add_argument(
        "--attention",
        type=one_of(ATTENTION),
        help=f"one of {', '.join(ATTENTION)}; automatic if absent",
    )
    _add_mesh(parser)
    _add_outputs(parser)


def _match(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        default="demo",
        help=f"demo, the folder of a checkpoint, or random weights of {', '.join(SHAPES)}",
    )
    _add_weights(parser)
    _add_dtype(parser)
    _add_several(
        *(parser, "--drafter", str, ["oracle", "ngram"]),
        "oracle knows the plain text; for the demo also demo, demo_small_lm, hierarchy; or a "
        "draft's folder or kind",
    )
    parser.add_argument(
        "--tree",
        **several(cli.drafting_tree),
        default=ByMachine([*MATCHED_TREES], [MATCHED_TREES[-1]]),
        help=f"what is verified in a round: {cli.TREE_GRAMMAR}",
    )
    _add_several(
        *(parser, "--batch", COUNT, ByMachine([1, 8], [1, 3])), "rows that are decoded at once"
    )
    _add_several(
        *(
            parser,
            "--context",
            COUNT,
            ByMachine([128, 256, 384, 512, 640, 1024, 2048, 4096], [128]),
        ),
        "boundaries, in tokens: prompts have as many, one less and one more",
    )
    _add_new_tokens(parser, ByMachine(160, 24), "tokens of every prompt")
    _add_same_bits(parser)
    _add_mesh(parser)
    _add_outputs(parser)


def _quantised(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="demo", help="demo, or a target in 16 or 32 bits")
    _add_several(
        *(parser, "--quantised", str, []),
        "folders of the same target quantised; made from it if absent",
    )
    parser.add_argument("--draft", default="demo", help="demo, or a draft's folder or kind")
    _add_dtype(parser)
    _add_tree(parser)
    parser.add_argument("--context", type=COUNT, default=1024, help="tokens of every text")
    _add_new_tokens(parser, ByMachine(256, 128), "tokens that continue every text")
    _add_outputs(parser)


def _products(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser, ByMachine(["vicuna7b"], ["demo"]))
    parser.add_argument(
        "--rows",
        **several(COUNT, commas=True),
        default=[1, 16, 64],
        help="rows that are multiplied",
    )
    _add_several(
        *(parser, "--weights", one_of(WEIGHTS), ["whole"]),
        f"how weights are stored: {', '.join(WEIGHTS)}",
    )
    _add_outputs(parser)


def _serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        type=one_of([*SHAPES]),
        default=ByMachine("vicuna7b", "demo"),
        help=f"random weights of a shape, or demo, whose weights are real: {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--acceptance",
        type=ACCEPTANCE,
        default=ByMachine(3.545, 2.1),
        help="of random weights: mean tokens of a round with 64 nodes, the bonus included; fewer "
        "nodes keep less",
    )
    parser.add_argument(
        "--draft_option",
        **several(cli.draft_option),
        metavar="NAME[=VALUE]",
        help="an option of the LongSpec draft, such as int8",
    )
    parser.add_argument(
        "--context", type=COUNT, default=ByMachine(4096, 512), help="tokens of every prompt"
    )
    _add_new_tokens(parser, ByMachine(512, 48), "tokens of every answer")
    _add_several(
        *(parser, "--concurrency", COUNT, ByMachine([1, 8, 32], [1, 4])), "requests at any time"
    )
    parser.add_argument(
        "--rate",
        type=cli.number(Real(0.0, 1e6, "above 0", includes_least=False)),
        help="requests a second, arriving as a Poisson process, instead of --concurrency",
    )
    parser.add_argument(
        "--seconds",
        type=COUNT,
        default=ByMachine(15, 5),
        help="of every row, after which no further request begins",
    )
    parser.add_argument(
        "--long_context",
        type=COUNT,
        default=ByMachine(12288, 2048),
        help="tokens of a prompt that is sent beside four running streams",
    )
    parser.add_argument(
        "--max_gap_ms",
        type=COUNT,
        default=ByMachine(50, 1000),
        help="the longest pause of these streams, as of infer.serve",
    )
    _add_outputs(parser)


def _texts(parser: argparse.ArgumentParser) -> None:
    words = "demo, a released model (smollm2), a folder, a GGUF file or a hub id"
    parser.add_argument("--target", default="demo", type=target_source, help=words)
    _add_several(parser, "--draft", str, ["demo"], "drafts, by name, folder or kind")
    parser.add_argument(
        "--files", nargs="+", type=cli.file_path, required=True, help="text files, of one kind"
    )
    parser.add_argument("--question", help="asked about every piece, in the target's chat form")
    _add_several(parser, "--context", COUNT, ByMachine([1024, 8192], [256]), "tokens of a piece")
    temperature = cli.number(rule("temperature"))
    _add_several(parser, "--temperature", temperature, [0.0, 1.0], "0 is greedy")
    parser.add_argument(
        "--tree",
        **several(cli.drafting_tree),
        help=f"the default choice if absent, else each of them: {cli.TREE_GRAMMAR}",
    )
    _add_dtype(parser)
    _add_new_tokens(parser, ByMachine(256, 32), "tokens that continue every prompt")
    _add_outputs(parser)


def _transformers(parser: argparse.ArgumentParser) -> None:
    _add_setting(parser)
    _add_new_tokens(parser, ByMachine(24, 8), "tokens of one repetition")
    _add_repetitions(parser, 3)
    _add_outputs(parser)


BENCHMARKS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "attention": (
        "attention",
        "attention of tree nodes to a long prefix, and the rooflines",
        _attention,
    ),
    "decode": ("decode", "whole rounds and plain steps of real shapes, and the gain", _decode),
    "match": ("match", "whether the text is that of plain decoding, token by token", _match),
    "products": ("products", "the matmuls of a verification, beside XLA's", _products),
    "quantised": ("quantised", "what quantised weights change, and cost a draft", _quantised),
    "serve": ("serve", "a whole server under load, through HTTP", _serve),
    "texts": ("texts", "drafts on real text, with real weights, beside plain decoding", _texts),
    "transformers": ("hugging_face", "plain decoding by Hugging Face transformers", _transformers),
}
"""Commands: the module that provides ``main(arguments)``, what it answers, its options."""


def _add_several(
    parser: argparse.ArgumentParser, option: str, kind: Any, default: Any, words: str
) -> None:
    parser.add_argument(option, **several(kind, commas=True), default=default, help=words)


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    words, default = f"one of {', '.join(DTYPES)}", ByMachine("bfloat16", "float32")
    parser.add_argument("--dtype", type=one_of(DTYPES), default=default, help=words)


def _add_tree(parser: argparse.ArgumentParser) -> None:
    words, default = f"what is verified in a round: {cli.TREE_GRAMMAR}", (DEFAULT_TREE, CHAIN)
    parser.add_argument("--tree", type=cli.drafting_tree, default=ByMachine(*default), help=words)


def _add_shape(parser: argparse.ArgumentParser, default: ByMachine) -> None:
    _add_several(parser, "--shape", one_of([*SHAPES]), default, f"any of {', '.join(SHAPES)}")


def _add_setting(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser, ByMachine(["vicuna7b"], ["demo"]))
    _add_several(parser, "--context", COUNT, ByMachine([4096], [1024]), "cached tokens")
    _add_several(parser, "--batch", COUNT, [1], "rows")


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=("whole", *GROUPS, EXPERTS),
        default="whole",
        help=f"how the target's weights are stored; {EXPERTS} are the experts of sparse targets",
    )


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        type=cli.mesh,
        metavar="AXIS=N,...",
        help=f"devices to spread the target over: {cli.MESH_GRAMMAR}; one if absent",
    )


def _add_same_bits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--same_bits",
        action=argparse.BooleanOptionalAction,
        help="as of python -m infer.decode: on where there are such kernels, unless --no-same_bits",
    )


def _add_new_tokens(parser: argparse.ArgumentParser, default: ByMachine, words: str) -> None:
    parser.add_argument("--new_tokens", type=SEVERAL_TOKENS, default=default, help=words)


def _add_repetitions(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--repetitions", type=COUNT, default=default, help="decodes of which the median counts"
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=cli.result_file, help="write header and rows to this file")
    cli.add_traceback(parser)


def target_source(text: str) -> str | Path:
    """The demo's folder, or a target as it is named."""
    return DEMO / "target" if text == DEMO_NAME else text


def draft_source(text: str) -> str:
    """A kind of draft, or a draft's folder."""
    named = text in KINDS or not Path(text).is_dir()
    return one_of([*KINDS])(text) if named else text


def head_counts(text: str) -> tuple[int, int]:
    """Query heads and key/value heads, from ``32/8``."""
    try:
        heads, kv_heads = map(COUNT, text.split("/"))
    except (ValueError, argparse.ArgumentTypeError):
        heads, kv_heads = 1, 0
    if kv_heads == 0 or heads % kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be query heads and key/value heads, the first a multiple of the "
            "second, such as 32/8"
        )
    return heads, kv_heads
