"""The options of the benchmarks, declared apart from them: ``--help`` imports no jax.

A default may be one value for accelerators and another for CPUs, where the measurements made for
GPUs would take hours (:class:`longspec_jax.cli.ByMachine`).
"""

import argparse
from collections.abc import Mapping
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
from longspec_jax.drafters.registry import (
    DFLASH,
    EAGLE3,
    LONGSPEC,
    MTP,
    NAMED,
    PARALLEL,
    PEAGLE,
    SMALL_LM,
    Kind,
)
from longspec_jax.embedded import DEMO, DEMO_NAME
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.json_files import read_json
from train.drafts.kinds import KINDS as TRAINED

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
    "peagle": PEAGLE,
    "mtp": MTP,
    "dflash": DFLASH,
    "parallel": PARALLEL,
}
"""Kinds of drafts that are measured with random weights."""
GROUPS = {"fp8": 0, "fp8-blocks": 128, "w4a16": 128}
"""Inputs that share a scale, by how a quantised target is stored; all if 0."""
GGUF = {"q4_0": ["Q4_0"], "q8_0": ["Q8_0"], "q4_k": ["Q4_K"], "q6_k": ["Q6_K"]}
GGUF["q4_k_q6_k"] = ["Q4_K", "Q6_K"]
"""Types of the matrices of a GGUF file that are multiplied together."""
Q4_K_M = "q4_k_m"
"""A mixture of them: the LM head and, in every other layer, values and the last matmul of an MLP
are Q6_K, all else Q4_K."""
EXPERTS = "mxfp4"
"""How gpt-oss's experts are stored, besides whole weights."""
WEIGHTS = ("whole", "one-order", "int8", *GROUPS, *GGUF)
"""How the weights of matmuls are stored; those of a draft are in 8 bits or whole. Whole ones may be
multiplied in one order."""
DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_CANDIDATES = ("ours", "pallas", "mosaic", "triton", "xla", "cudnn", "xla-masked")
"""What ``attention`` compares; ours is the automatic choice."""
CODE, PROSE, CHAT = KINDS_OF_TEXT = "code", "prose", "chat"
"""Real text that continues or is asked about (:mod:`benchmarks.prompts`)."""
MEASURED = "plain", "round", "real", "attention"
"""Plain steps and rounds of a shape, texts of a real model, attention by itself
(:mod:`benchmarks.peers`)."""
DEFAULT = "default"
"""Among trees, the choice of calls that name none."""
CHAIN = TreeConfig((1, 1, 1))
"""A small tree: the fastest on a CPU, which computes node after node."""
MATCHED_TREES = (
    TreeConfig((4, 16, 16, 16, 16), 64),
    TreeConfig((4, 16, 16, 16, 16)),
    TreeConfig((4, 8, 8, 8), 16),
    TreeConfig((1,) * 6),
)
"""Trees of 64, 69 and 16 nodes, and a chain."""
Options = dict[str, dict[str, Any]]
"""What ``add_argument`` takes, by the name of an option."""


def _of(kind: Any, words: str, default: Any = None, **more: Any) -> dict[str, Any]:
    """An option with one value."""
    return {"type": kind, "help": words, "default": default, **more}


def _each(kind: Any, words: str, default: Any = None) -> dict[str, Any]:
    """An option that is given once for each of its values, or with commas between them."""
    return {**several(kind, commas=True), "help": words, "default": default}


def _trees(kind: Any, words: str, default: Any) -> dict[str, Any]:
    """An option that is given once for each of its trees, which have commas of their own."""
    return {**several(kind), "help": words, "default": default}


def _draft_option(words: str) -> dict[str, Any]:
    return {**several(cli.draft_option), "metavar": "NAME[=VALUE]", "help": words}


def drafting_tree(text: str) -> TreeConfig:
    """A tree with nodes, for what measures a draft next to plain decoding."""
    found = cli.tree(text)
    if not found.num_levels:
        raise argparse.ArgumentTypeError(
            f"{text} drafts nothing, and plain decoding is measured with every tree; name a tree "
            "with nodes, such as chain:4"
        )
    return found


def text_tree(text: str) -> TreeConfig | None:
    """A tree with nodes; None for the default choice."""
    return None if text == DEFAULT else drafting_tree(text)


def mesh_text(axes: Mapping[str, int]) -> str:
    """The argument that names these axes; empty for none."""
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


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


SEVERAL_TOKENS = cli.value(Whole(2))
"""New tokens: the first comes from the prefill, so a single one is no decoding."""
ACCEPTANCE = _of(
    cli.value(Real(0.0, LARGEST_FLOAT32, ">= 0 and finite")),
    "mean tokens emitted per round, the bonus included; serve: of 64 nodes, fewer keep less",
    ByMachine(3.545, 2.1),  # The paper's 3.57 of 69 nodes.
)
SHAPE = _each(one_of([*SHAPES]), f"any of {', '.join(SHAPES)}", ByMachine(["vicuna7b"], ["demo"]))
DTYPE = _of(one_of(DTYPES), f"one of {', '.join(DTYPES)}", ByMachine("bfloat16", "float32"))
TREE_WORDS = f"what is verified in a round: {cli.TREE_GRAMMAR}"
STORED = {
    "choices": ("whole", *GROUPS, Q4_K_M, EXPERTS),
    "default": "whole",
    "help": f"how the target's weights are stored; {EXPERTS} are the experts of sparse targets",
}
MESH = _of(
    cli.mesh,
    f"devices to spread the target over: {cli.MESH_GRAMMAR}; one if absent",
    metavar="AXIS=N,...",
)
BATCH_INVARIANT = {
    "action": argparse.BooleanOptionalAction,
    "help": "as of python -m infer.decode: on where there are such kernels, unless "
    "--no-batch_invariant",
}
ATTENTION_OPTIONS: Options = {
    "tokens": _each(COUNT, "tree nodes", ByMachine([1, 16, 48, 69, 128], [1, 16])),
    "heads": _each(
        head_counts,
        "query/key-value heads, such as 32/8",
        ByMachine([(32, 32), (32, 8), (40, 8)], [(8, 2)]),
    ),
    "context": _each(COUNT, "cached tokens", ByMachine([4096, 16384, 32768, 131072], [2048])),
    "batch": _each(COUNT, "rows", ByMachine([1, 8], [1])),
    "dtype": DTYPE,
    "implementation": _each(
        one_of(ATTENTION_CANDIDATES),
        f"any of {', '.join(ATTENTION_CANDIDATES)}",
        ByMachine(["ours", "mosaic", "cudnn", "xla-masked"], ["ours", "xla-masked"]),
    ),
}
DECODE: Options = {
    "shape": SHAPE,
    "context": _each(COUNT, "cached tokens", ByMachine([4096], [1024])),
    "batch": _each(COUNT, "rows", [1]),
    "acceptance": ACCEPTANCE,
    "weights": STORED,
    "draft": _of(
        draft_source,
        f"kind of the draft, of random weights: {', '.join(KINDS)}; or the folder of a draft for "
        "this shape",
        "longspec",
    ),
    "tree": _trees(drafting_tree, TREE_WORDS, ByMachine([DEFAULT_TREE], [CHAIN])),
    "draft_option": _draft_option(
        "an option of the draft's kind. longspec: int8 reads weights and LM head in 8 bits (here "
        "only where it is named), vocabulary=N proposes N tokens only"
    ),
    "new_tokens": _of(SEVERAL_TOKENS, "tokens of one repetition", ByMachine(192, 48)),
    "repetitions": _of(COUNT, "decodes; the median counts", ByMachine(3, 2)),
    "batch_invariant": BATCH_INVARIANT,
    "kv_dtype": {"choices": KV_DTYPES, "help": "of the cache; as activations if absent"},
    "turns": _of(COUNT, "repeats of a separately timed part", ByMachine(10, 3)),
    "prefill": _of(
        COUNT,
        "also time the target's prefill of the context, in chunks of this many tokens",
        metavar="TOKENS",
    ),
    "attention": _of(one_of(ATTENTION), f"one of {', '.join(ATTENTION)}; automatic if absent"),
    "mesh": MESH,
}
MATCH: Options = {
    "target": _of(
        str, f"demo, the folder of a checkpoint, or random weights of {', '.join(SHAPES)}", "demo"
    ),
    "weights": STORED,
    "dtype": DTYPE,
    "drafter": _each(
        str,
        "oracle knows the plain text; for the demo also demo, demo_small_lm, hierarchy; or a "
        "draft's folder or kind",
        ["oracle", "ngram"],
    ),
    "tree": _trees(drafting_tree, TREE_WORDS, ByMachine([*MATCHED_TREES], [MATCHED_TREES[-1]])),
    "batch": _each(COUNT, "rows that are decoded at once", ByMachine([1, 8], [1, 3])),
    "context": _each(
        COUNT,
        "boundaries, in tokens: prompts have as many, one less and one more",
        ByMachine([128, 256, 384, 512, 640, 1024, 2048, 4096], [128]),
    ),
    "new_tokens": _of(SEVERAL_TOKENS, "tokens of every prompt", ByMachine(160, 24)),
    "batch_invariant": BATCH_INVARIANT,
    "mesh": MESH,
}
PRODUCTS: Options = {
    "shape": SHAPE,
    "rows": _each(COUNT, "rows that are multiplied", [1, 16, 64]),
    "weights": _each(one_of(WEIGHTS), f"how weights are stored: {', '.join(WEIGHTS)}", ["whole"]),
}
SERVE: Options = {
    "target": _of(
        one_of([*SHAPES]),
        f"random weights of a shape, or demo, whose weights are real: {', '.join(SHAPES)}",
        ByMachine("vicuna7b", "demo"),
    ),
    "acceptance": ACCEPTANCE,
    "draft_option": _draft_option("an option of the LongSpec draft, such as int8"),
    "context": _of(COUNT, "tokens of every prompt", ByMachine(4096, 512)),
    "new_tokens": _of(SEVERAL_TOKENS, "tokens of every answer", ByMachine(512, 48)),
    "concurrency": _each(COUNT, "requests at any time", ByMachine([1, 8, 32], [1, 4])),
    "seconds": _of(COUNT, "of every row, after which no further request begins", ByMachine(15, 5)),
    "long_context": _of(
        COUNT,
        "tokens of a prompt that is sent alongside four running streams",
        ByMachine(12288, 2048),
    ),
    "max_itl_ms": _of(
        COUNT, "the longest pause of these streams, as in infer.serve", ByMachine(50, 1000)
    ),
}
TEXTS: Options = {
    "target": _of(
        cli.path,
        "demo, a released model (smollm2), a folder, a GGUF file or a hub id",
        DEMO_NAME,
    ),
    "draft": _each(cli.path, "drafts, by name, folder or kind; the target's own if absent"),
    "draft_option": _draft_option("an option of the drafts, as in python -m infer.decode"),
    "text": _each(
        one_of(KINDS_OF_TEXT),
        f"any of {', '.join(KINDS_OF_TEXT)}; all if absent, and {CODE} with --files",
    ),
    "files": _of(cli.file_path, "text files in place of what is installed", [], nargs="+"),
    "texts": _of(COUNT, "prompts of every kind and length", ByMachine(8, 2)),
    "context": _each(COUNT, "tokens of a prompt", ByMachine([1024, 8192], [256])),
    "batch": _each(COUNT, "prompts that are decoded at once", [1]),
    "temperature": _each(cli.value(rule("temperature")), "0 is greedy", [0.0, 1.0]),
    "top_k": _of(
        cli.value(rule("top_k")), "most likely tokens that stay above temperature 0; 0 for all", 0
    ),
    "top_p": _of(
        cli.value(rule("top_p")), "mass of the tokens that stay above temperature 0; 1 for all", 1.0
    ),
    "tree": _trees(
        text_tree,
        f"{DEFAULT} for the default choice, which is taken if absent, and what it is compared "
        f"with: {cli.TREE_GRAMMAR}",
        [None],
    ),
    "dtype": DTYPE,
    "new_tokens": _of(SEVERAL_TOKENS, "tokens that continue every prompt", ByMachine(256, 32)),
}
TRAIN: Options = {
    "shape": SHAPE | {"default": ByMachine(["vicuna7b"], ["tiny"])},
    "draft": {
        "choices": [*TRAINED],
        "default": "longspec",
        "help": "kind of draft that is trained",
    },
    "length": _each(cli.value(Whole(2)), "tokens of a row", ByMachine([1024], [64])),
    "mesh": MESH
    | {
        "action": "append",
        "help": f"{cli.MESH_GRAMMAR}; repeat to measure several; one device if absent",
    },
    "tokens": _of(
        COUNT,
        "tokens of a micro-batch on each device that holds rows",
        ByMachine(16384, 128),
    ),
    "accumulation": _of(COUNT, "micro-batches of a step", 4),
    "steps": _of(COUNT, "timed steps, after one warm-up step", 4),
}
PEERS = (
    *("ours", "ours-fastest", "vllm", "vllm-invariant", "transformers", "jetspec", "llama.cpp"),
    *("gpt-fast", "flashinfer", "tokamax"),
)
"""Engines that are measured next to one another (:mod:`benchmarks.peers`)."""
PEER: Options = {
    "peer": _each(one_of(PEERS), f"any of {', '.join(PEERS)}", [*PEERS]),
    "what": _each(
        one_of(MEASURED),
        "plain steps, rounds of a drawn acceptance, real texts, attention",
        [*MEASURED],
    ),
    **{name: DECODE[name] for name in ("shape", "context", "batch", "new_tokens", "repetitions")},
    "acceptance": ACCEPTANCE,
    "home": _of(
        cli.file_path,
        "where peers lie that are not installed: vllm/ packages, llama.cpp/bin programs",
    ),
    "target": _of(cli.path, "the folder of real weights, for real texts"),
    "gguf": _each(cli.file_path, "files of the same weights, for llama.cpp", []),
    "files": TEXTS["files"],
    "texts": TEXTS["texts"],
    "draft": _of(cli.path, "an EAGLE-3 draft of the target, for real texts of ours and vLLM"),
    "temperature": TEXTS["temperature"],
    "seconds": _of(COUNT, "after which a process of a peer is ended", 300),
}
BENCHMARKS: dict[str, tuple[str, str, Options]] = {
    "attention": (
        "attention",
        "attention of tree nodes to a long prefix, and the rooflines",
        ATTENTION_OPTIONS,
    ),
    "decode": ("decode", "whole rounds and plain steps of real shapes, and the gain", DECODE),
    "match": ("match", "whether the text is that of plain decoding, token by token", MATCH),
    "peers": ("peers.run", "other engines next to ours, on one card", PEER),
    "products": ("products", "the matmuls of a verification, next to XLA's", PRODUCTS),
    "serve": ("serve", "a whole server under load, through HTTP", SERVE),
    "texts": ("texts", "drafts on real text, with real weights, next to plain decoding", TEXTS),
    "train": ("train", "whole training steps of a draft", TRAIN),
}
"""Commands: the module that provides ``main(arguments)``, what it answers, its options."""


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    result = cli.Parser(
        prog="python -m benchmarks",
        description="Measure how fast decoding and its parts are, next to the alternatives.",
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="|".join(BENCHMARKS))
    for name, (_, summary, options) in BENCHMARKS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        for option, declared in options.items():
            command.add_argument(f"--{option}", **declared)
        command.add_argument(
            "--json", type=cli.result_file, help="write header and rows to this file"
        )
        cli.add_traceback(command)
    return result
