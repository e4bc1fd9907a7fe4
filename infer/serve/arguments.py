"""The options of ``python -m infer.serve``."""

import argparse
from dataclasses import replace

import longspec_jax
from longspec_jax import cli
from longspec_jax.checks import Real, Truth, Whole
from longspec_jax.config.serving import OPTIONS
from longspec_jax.schema import Option

from ..arguments import add_models
from ..prompts import STYLES, read_text

EPILOG = """\
Without options it serves the embedded demo model only on this machine. It speaks OpenAI's protocol
(docs/guides/serving.md). Clients need the address that it prints.

SIGTERM and Ctrl-C end it in order: requests that run are finished, new ones are refused.

Exit status: 0 after SIGTERM or Ctrl-C while it serves, 2 for a request that cannot be met, 1 for a
failure while running, 130 after Ctrl-C and 143 after SIGTERM before it serves.
"""
_SECONDS = Real(0.0, 1e6, "above 0", includes_least=False)
SIZES = {
    "max_model_len": replace(
        OPTIONS["max_model_len"],
        default=None,
        about="most tokens of a request, prompt and answer; those that the target was made for if "
        "absent, on a CPU at most 4096",
    ),
    "max_itl_ms": OPTIONS["max_itl_ms"],
    "cpu_prefix_cache_bytes": OPTIONS["cpu_prefix_cache_bytes"],
}
CAPACITY = {
    "max_num_seqs": replace(OPTIONS["max_num_seqs"], default=None),
    "gpu_memory_utilization": Option(
        Real(0.0, 1.0, "above 0, at most 1", includes_least=False),
        0.9,
        "share of the free memory for as many slots as fit, instead of --max_num_seqs",
    ),
}
LIMITS = {
    "queue_requests": Option(
        Whole(),
        256,
        "most requests without a first token; their prompts have at most 64 times --max_model_len "
        "tokens",
    ),
    "request_seconds": Option(
        _SECONDS, None, "a request that takes longer is ended; no limit if absent"
    ),
    "drain_seconds": Option(
        _SECONDS, 30.0, "how long requests that run are awaited after SIGTERM or Ctrl-C"
    ),
    "log_prompts": Option(Truth(), False, "write prompts to the log"),
}


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    result = cli.Parser(
        prog=cli.command_name(__package__),
        description="Serve a model with speculation over HTTP, in OpenAI's protocol.",
        epilog=EPILOG,
    )
    version = f"longspec_jax {longspec_jax.__version__}"
    result.add_argument("--version", action="version", version=version)
    group = add_models(result, "Plain decoding if absent")
    group.add_argument(
        "--tree",
        type=cli.tree,
        help=f"what the draft proposes in a round: {cli.TREE_GRAMMAR}. none: plain decoding. If "
        "absent, the server chooses by measured tokens per second",
    )
    group.add_argument(
        "--chat_template",
        type=cli.path,
        metavar="FILE",
        help="a Jinja template for chat messages instead of the tokenizer's own, or the name of a "
        f"format: {', '.join(STYLES)}",
    )
    _add_address(result.add_argument_group("address"))
    sizes, limits = result.add_argument_group("sizes"), result.add_argument_group("limits")
    cli.add_options(sizes, SIZES)
    cli.add_options(sizes.add_mutually_exclusive_group(), CAPACITY)
    cli.add_options(limits, LIMITS)
    cli.add_traceback(limits)
    return result


def _add_address(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        type=cli.word,
        default="127.0.0.1",
        help="the address to listen at; 0.0.0.0 for all of this machine's",
    )
    group.add_argument(
        "--port", type=cli.value(Whole(0, 65535)), default=8000, help="0 for any free one"
    )
    keys = group.add_mutually_exclusive_group()
    keys.add_argument(
        "--api_key", type=cli.word, metavar="KEY", help="what clients must send; none if absent"
    )
    keys.add_argument(
        "--api_key_file",
        type=cli.file_path,
        metavar="FILE",
        help="a file with the key, or with one on each line: requests of different keys learn "
        "nothing of each other, and only the first key may read /metrics and /stats",
    )
    group.add_argument(
        "--served_model_name",
        **cli.several(cli.word),
        metavar="NAME",
        help="the model's name for clients; the target's if absent",
    )


def read_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The API keys, the operator's first.

    Raises:
      OSError: for a file that cannot be read.
      ValueError: for one without a key, or with a key twice.
    """
    if arguments.api_key_file is None:
        return () if arguments.api_key is None else (arguments.api_key,)
    lines = read_text(arguments.api_key_file, "--api_key_file").splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys or len({*keys}) < len(keys):
        raise ValueError(
            f"--api_key_file={arguments.api_key_file} must hold the key on one line, or several "
            f"keys, each on a line of its own and once; it has {len(keys)} lines with a key, "
            f"{len({*keys})} of them different"
        )
    return tuple(keys)


def read_template(arguments: argparse.Namespace) -> str | None:
    """The chat template that is named, as text, or the name of a format; None for none.

    Raises:
      OSError: for a file that cannot be read.
      ValueError: for one that is too large or no UTF-8 text.
    """
    named = arguments.chat_template
    if named is None or named in STYLES:
        return named
    return read_text(named, "--chat_template")
