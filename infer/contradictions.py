"""Arguments that cannot be meant together: refused, where one would be ignored."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from longspec_jax.config import PLAIN
from longspec_jax.drafters.registry import is_name
from longspec_jax.embedded import DRAFTS

from .arguments import has_draft, is_demo
from .prompt_files import STDIN, Prompt

_ABOUT_TREES = ("tree", "adaptive")
_ABOUT_DRAFTS = ("drafter_option",)


def check(arguments: argparse.Namespace) -> None:
    """Raise for the first contradiction among the arguments.

    Raises:
      ValueError: with the options as they are typed.
    """
    for message in _contradictions(arguments):
        raise ValueError(message)


def _contradictions(arguments: argparse.Namespace) -> Iterator[str]:
    yield from _models(arguments)
    yield from _placement(arguments)
    yield from _decoding(arguments)
    yield from _files(arguments)
    if not arguments.batch:
        yield from _filters(arguments)


def _models(arguments: argparse.Namespace) -> Iterator[str]:
    named = arguments.drafter or []
    trained = [draft for draft in named if not is_name(draft)]
    for draft in trained:
        if draft not in DRAFTS and arguments.target is None:
            yield (
                f"--drafter {draft} needs the --target it was made for; a draft works with no "
                "other (--target demo for the demo's)"
            )
        if draft in DRAFTS and not is_demo(arguments):
            yield f"--drafter {draft} is the demo's own draft, and --target is {arguments.target}"
    for draft in named:
        if named.count(draft) > 1:
            yield f"--drafter {draft} is named twice; once is enough"
    targets = [] if is_demo(arguments) else [str(arguments.target)]
    for model, revision, sources in (
        ("target", "revision", targets),
        ("drafter", "drafter_revision", trained),
    ):
        if getattr(arguments, revision) is None:
            continue
        if not sources:
            yield (
                f"--{revision} chooses a version on the hub, and no --{model} of the hub is named"
            )
        for source in sources:
            if Path(source).is_dir():
                yield (
                    f"--{revision} chooses a version on the hub, and --{model} {source} is a "
                    "folder; drop one of the two"
                )


def _placement(arguments: argparse.Namespace) -> Iterator[str]:
    """A cache in the host's memory, and what cannot be had with it."""
    for option in ("mesh", "row_slots"):
        if arguments.offload and getattr(arguments, option):
            yield (
                f"--offload keeps the cache of one device and of all rows at once in the host's "
                f"memory, and --{option} shares it out; drop one of the two"
            )


def _decoding(arguments: argparse.Namespace) -> Iterator[str]:
    """Options about speculation without any."""
    plain = arguments.tree == PLAIN
    if plain and arguments.adaptive:
        yield "--adaptive has nothing to choose with --tree none; drop one of the two"
    if not plain and has_draft(arguments):
        return
    reason = "--tree none has none" if plain else "no --drafter is named"
    remedy = "drop one of the two" if plain else "name a draft, or drop it"
    for option in _ABOUT_DRAFTS:
        if getattr(arguments, option):
            yield f"--{option} is about a draft, and {reason}; {remedy}"
    for option in () if plain else _ABOUT_TREES:
        if getattr(arguments, option):
            yield f"--{option} is about a draft's trees, and {reason}; {remedy}"
    if arguments.compare:
        yield f"--compare needs a draft to compare, and {reason}; {remedy}"


def _files(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.stream and arguments.batch:
        yield "--stream shows one prompt as it is completed, and --batch has several; drop --stream"
    if (arguments.prompt_file or []).count(STDIN) > 1:
        yield "--prompt_file -: standard input can be read once"
    cache = arguments.compilation_cache
    if cache not in (None, "off") and Path(cache).exists() and not Path(cache).is_dir():
        yield f"--compilation_cache {cache} is no folder; name one, or off for none"


def _filters(arguments: argparse.Namespace) -> Iterator[str]:
    for option in ("top_k", "top_p"):
        if arguments.temperature == 0 and _filters_at(option, getattr(arguments, option)):
            yield (
                f"--{option} {getattr(arguments, option)} filters what is drawn, and --temperature "
                "0 draws nothing; pass a --temperature above 0, or drop it"
            )


def check_rows(arguments: argparse.Namespace, rows: Sequence[Prompt]) -> None:
    """The same for a batch, whose rows may have a temperature of their own."""
    samples = [row.options.get("temperature", arguments.temperature) > 0 for row in rows]
    for row, draws in zip(rows, samples, strict=True):
        for option in ("top_k", "top_p"):
            value = row.options.get(option)
            if value is not None and not draws and _filters_at(option, value):
                raise ValueError(
                    f"{row.name}: {option} {value} filters what is drawn, and temperature 0 draws "
                    "nothing; give the row a temperature above 0, or drop it"
                )
    if arguments.batch and not any(samples):
        for message in _filters(arguments):
            raise ValueError(message)


def _filters_at(option: str, value: float) -> bool:
    return value > 0 if option == "top_k" else value < 1
