"""The options of ``python -m infer.decode``: declared, checked against each other, and read."""

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import longspec_jax
from longspec_jax import cli
from longspec_jax.checks import nearest
from longspec_jax.config import loading
from longspec_jax.config.sampling import (
    FILTERS,
    NUMBERS,
    OPTIONS,
    PENALTIES,
    GenerateOptions,
    neutral,
)
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.registry import NAMED, OWN, is_name, split_module
from longspec_jax.embedded import DEMO_NAME, DRAFTS
from longspec_jax.released import RELEASED

from .output import output_file
from .prompts import (
    ROW_OPTIONS,
    STDIN,
    STYLES,
    Prompt,
    check_text,
    read_batch,
    read_messages,
    read_prompt_file,
)

Options = argparse._ActionsContainer
"""A parser, or a group of its options."""
DRAFT_HELP = (
    "Several propose into one tree, and prompt lookup with them; a --tree has lookup only with ~, "
    "as in 4,16x4@64~8. Plain decoding if absent"
)
UNSET = {name: option.default for name, option in loading.OPTIONS.items()}
"""How models are loaded where no option is named."""
NO_FILTER = neutral(FILTERS)
NO_PENALTY = neutral(PENALTIES)
BATCH_LINE = (
    "A line of a --batch file is a JSON string, or an object with prompt, messages or input_ids "
    f"and any of {', '.join(ROW_OPTIONS)} for its row."
)
EPILOG = f"""\
Without arguments the embedded demo model completes a held-out document of more than 8000 tokens.

A file named - is standard input. An option that takes several values is repeated for each.

{textwrap.fill(BATCH_LINE, 100)}

Exit status: 0, 2 for a request that cannot be met, 1 for a failure while running, 130 after Ctrl-C,
143 after SIGTERM, 129 after SIGHUP: --json has the prompts that were finished until then.
"""


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    result = cli.Parser(
        prog=cli.command_name(__package__, "decode"),
        description="Decode with LongSpec: the target's own text, several tokens per pass.",
        epilog=EPILOG,
    )
    version = f"longspec_jax {longspec_jax.__version__}"
    result.add_argument("--version", action="version", version=version)
    models = add_models(result, DRAFT_HELP)
    add_memory(models)
    add_trees(models, "the fastest on this machine, which may be none")
    _add_prompts(result)
    add_sampling(result)
    _add_output(result)
    return result


def add_models(result: argparse.ArgumentParser, draft_help: str) -> Options:
    """Add the options that name models and say how to load them; returns their group."""
    group = result.add_argument_group("models")
    group.add_argument(
        "--target",
        type=cli.path,
        help="folder, GGUF file or hub id of the target, or a released model that is fetched: "
        f"{', '.join(RELEASED)}; the demo's if absent",
    )
    group.add_argument(
        "--draft",
        **cli.several(cli.path),
        help="what proposes tokens: the folder or hub id of a draft made for the target; "
        f"{' or '.join(NAMED)}, which need no weights; {OWN}, the target's own MTP layer; for the "
        f"demo, {' or '.join(DRAFTS)}. "
        f"{draft_help}",
    )
    group.add_argument(
        "--draft_option",
        **cli.several(cli.draft_option),
        metavar="NAME[=VALUE]",
        help="an option of the draft (docs/guides/decoding.md). LongSpec drafts: int8 (weights "
        "and LM head in 8 bits), vocabulary=N (propose the N most frequent tokens only), working=N "
        "(read N tokens of a long cache). Small language models: working=N. EAGLE and DFlash "
        "drafts: int8, window=N (see the last N tokens). suffix: shared=true (a server's requests "
        "draft from each other's texts, and clients can so guess what others write), shared=false. "
        "All drafts: retrieve=N (check rounds over N tokens of the target's cache first)",
    )
    of_rows = {"max_num_seqs", "offload"}
    declared = {name: one for name, one in loading.OPTIONS.items() if name not in of_rows}
    cli.add_options(group, declared)
    group.add_argument(
        "--mesh",
        type=cli.mesh,
        metavar="AXIS=N,...",
        help=f"devices to spread the models over: {cli.MESH_GRAMMAR}. tp: heads, MLP width and "
        "vocabulary; data: rows; fsdp: rows and weights. One device if absent",
    )
    return group


def add_memory(group: Options) -> None:
    """Add the options that decide where the rows of a call lie."""
    cli.add_options(group, {name: loading.OPTIONS[name] for name in ("max_num_seqs", "offload")})


def add_trees(group: Options, absent: str) -> None:
    """Add the options that choose what is proposed; says which tree runs if none is named."""
    group.add_argument(
        "--tree",
        type=cli.tree,
        help=f"what the draft proposes in a round: {cli.TREE_GRAMMAR}. none: plain decoding. If "
        f"absent, {absent}",
    )
    group.add_argument(
        "--adaptive",
        action="store_true",
        help="choose among the tree, a smaller one and plain decoding by measured tokens per "
        "second, so that a draft that does not help costs next to nothing. Compiles several "
        "programs",
    )


def _add_prompts(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("prompts (one of these)").add_mutually_exclusive_group()
    group.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    group.add_argument("--prompt_file", **cli.several(cli.path), metavar="FILE", help="a text file")
    group.add_argument(
        "--messages", type=cli.word, help="chat messages: a JSON file, or the JSON itself"
    )
    group.add_argument(
        "--batch", type=cli.path, metavar="FILE.jsonl", help="prompts to decode as one batch"
    )
    group.add_argument("--all_prompts", action="store_true", help="every sample prompt of the demo")
    add_style(result)


def add_style(result: Options) -> None:
    """Add the option that chooses a chat format."""
    result.add_argument(
        "--prompt_style",
        choices=[*STYLES],
        help="chat format; with it, a text prompt becomes a user's message. native: the "
        "tokenizer's own; longspec: what the published drafts were trained with. Text as it is if "
        "absent",
    )


def add_sampling(result: argparse.ArgumentParser) -> None:
    """Add the options of the draws, and those that end a row."""
    group = result.add_argument_group("generation")
    cli.add_options(group, {name: OPTIONS[name] for name in NUMBERS})
    group.add_argument("--ignore_eos", action="store_true", help="do not stop at stop tokens")
    group.add_argument(
        "--stop",
        **cli.several(cli.any_text),
        metavar="TEXT",
        help="end before this text, besides the stop tokens; $'\\n' is a line feed in most shells",
    )


def _add_output(result: argparse.ArgumentParser) -> None:
    group = result.add_argument_group("output")
    yes_no = argparse.BooleanOptionalAction
    group.add_argument(
        "--compare",
        action=yes_no,
        help="decode plainly as well, for the speed without speculation and whether the text is "
        "the same; on unless --no-compare",
    )
    group.add_argument(
        "--stream",
        action=yes_no,
        help="show text as it is generated, on unless --no-stream; a batch is shown when done",
    )
    group.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="write the numbers and the text; - for standard output",
    )
    cli.add_traceback(group)


@dataclass(frozen=True)
class Models:
    """The models of a command, how they are loaded, and what is proposed."""

    target: str | None = None
    """The demo's if None."""
    draft: Sequence[str] | None = None
    draft_option: Sequence[tuple[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: UNSET)
    """Those of :data:`longspec_jax.config.loading.OPTIONS`, all of them."""
    mesh: Mapping[str, int] | None = None
    tree: TreeConfig | None = None
    """None if calls choose."""
    adaptive: bool = False

    @property
    def is_demo(self) -> bool:
        """Whether the target is the demo's."""
        return self.target in (None, DEMO_NAME)

    @property
    def drafts(self) -> Sequence[str]:
        """The drafts as they are named; else the demo's own, or those of a released model."""
        if self.draft:
            return self.draft
        if self.is_demo:
            return [DEMO_NAME]
        released = RELEASED.get(str(self.target))
        return released.drafters if released else ()


def models_of(arguments: argparse.Namespace) -> Models:
    """The models that a command line names; options that a command lacks stay as they are."""
    given = vars(arguments)
    return Models(
        **{each.name: given[each.name] for each in fields(Models) if each.name in given},
        options={name: given.get(name, default) for name, default in UNSET.items()},
    )


def sampling_options(arguments: argparse.Namespace) -> GenerateOptions:
    """Generation options for all rows."""
    options = cast(GenerateOptions, {name: getattr(arguments, name) for name in NUMBERS})
    if arguments.ignore_eos:
        options["eos_token_id"] = []
    if arguments.stop:
        options["stop_strings"] = arguments.stop
    return options


def has_penalty(arguments: argparse.Namespace) -> bool:
    """Whether logits of tokens that are there already are lowered, or raised."""
    return any(getattr(arguments, name) != neutral for name, neutral in NO_PENALTY.items())


def row_options(arguments: argparse.Namespace, row: Prompt) -> dict[str, Any]:
    """The options of a row: its own come first, and filters hold only where it samples."""
    merged = {**sampling_options(arguments), **row.options}
    return merged if merged["temperature"] > 0 else {**merged, **NO_FILTER}


def named_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts that the arguments name, read and checked; none for the demo's own."""
    if arguments.stream and arguments.batch:
        raise ValueError(
            "--stream shows one prompt as it is completed, and --batch has several; drop --stream"
        )
    if (arguments.prompt_file or []).count(STDIN) > 1:
        raise ValueError("--prompt_file -: standard input can be read once")
    if arguments.prompt is not None:
        return [Prompt("prompt", check_text(arguments.prompt, "--prompt"))]
    if arguments.prompt_file:
        return [read_prompt_file(path) for path in arguments.prompt_file]
    if arguments.messages:
        return [Prompt("messages", read_messages(arguments.messages))]
    return read_batch(arguments.batch) if arguments.batch else []


def check(models: Models, compare: bool = False) -> None:
    """Refuse options that contradict each other, where one would be ignored.

    Args:
      models: what is loaded, and what proposes.
      compare: whether a comparison with plain decoding is asked for.

    Raises:
      ValueError: for the first contradiction, with the options as they are typed.
    """
    for message in (*_models(models), *_placement(models), *_decoding(models, compare)):
        raise ValueError(message)
    if models.draft_option:
        _check_draft_options(models)


def check_filters(arguments: argparse.Namespace, prompts: Sequence[Prompt]) -> None:
    """Refuse filters of what is drawn where nothing is drawn.

    Raises:
      ValueError: with the option, or the row.
    """
    for message in _filters(arguments, prompts):
        raise ValueError(message)


def _check_draft_options(models: Models) -> None:
    """Refuse what the drafts that are here cannot take, before anything is loaded.

    Raises:
      ValueError: names the option.
    """
    from longspec_jax.loading import choose_drafts  # Imports jax.

    from .wording import command_words

    options = cli.as_options(models.draft_option)
    sources = [each if is_name(each) else DRAFTS.get(each, each) for each in models.drafts]
    here = [each for each in sources if is_name(each) or Path(split_module(each)[1]).is_dir()]
    if len(here) == len(sources):  # Others are on the hub, and fetched before they are checked.
        with command_words():
            target = models.target and Path(models.target)
            choose_drafts(here, options, target=target if target and target.is_dir() else None)


def _models(models: Models) -> Iterator[str]:
    named = models.draft or []
    trained = [draft for draft in named if not is_name(draft)]
    for draft in trained:
        if draft not in DRAFTS and models.target is None:
            meant = nearest(draft, (*NAMED, OWN, *DRAFTS))
            owners = [name for name, model in RELEASED.items() if draft in model.drafters]
            remedy = f"--target {owners[0]}" if owners else "--target demo for the demo"
            yield (
                f"--draft {draft} needs the --target it was made for; a draft works with no other "
                f"({f'did you mean {meant}?' if meant else remedy})"
            )
        if draft in DRAFTS and not models.is_demo:
            yield f"--draft {draft} is the demo's own draft, and --target is {models.target}"
    for draft in named:
        if named.count(draft) > 1:
            yield f"--draft {draft} is named twice; once is enough"
    targets = [] if models.is_demo else [str(models.target)]
    for model, revision, sources in (
        ("target", "revision", targets),
        ("draft", "draft_revision", trained),
    ):
        if models.options[revision] is None:
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


def _placement(models: Models) -> Iterator[str]:
    for option, divided in ("mesh", models.mesh), ("max_num_seqs", models.options["max_num_seqs"]):
        if models.options["offload"] and divided:
            yield (
                f"--offload keeps the cache of one device and of all rows at once in the host's "
                f"memory, and --{option} divides it; drop one of the two"
            )


def _decoding(models: Models, compare: bool) -> Iterator[str]:
    """Options about speculation where there is none."""
    plain = models.tree == PLAIN
    if plain and models.adaptive:
        yield "--adaptive has nothing to choose with --tree none; drop one of the two"
    if not plain and models.drafts:
        return
    reason = "--tree none has none" if plain else "no --draft is named"
    remedy = "drop one of the two" if plain else "name a draft, or drop it"
    if models.draft_option:
        yield f"--draft_option is about a draft, and {reason}; {remedy}"
    for option in () if plain else ("tree", "adaptive"):
        if getattr(models, option):
            yield f"--{option} is about a draft's trees, and {reason}; {remedy}"
    if compare:
        yield f"--compare needs a draft to compare, and {reason}; {remedy}"


def _filters(arguments: argparse.Namespace, rows: Sequence[Prompt]) -> Iterator[str]:
    samples = [row.options.get("temperature", arguments.temperature) > 0 for row in rows]
    for row, draws in zip(rows, samples, strict=True):
        for option, without in NO_FILTER.items():
            value = row.options.get(option)
            if value is not None and not draws and value != without:
                yield (
                    f"{row.name}: {option} {value} filters what is drawn, and temperature 0 draws "
                    "nothing; give the row a temperature above 0, or drop it"
                )
    if any(samples) or arguments.temperature > 0:
        return
    for option, without in NO_FILTER.items():
        if getattr(arguments, option) != without:
            yield (
                f"--{option} {getattr(arguments, option)} filters what is drawn, and --temperature "
                "0 draws nothing; pass a --temperature above 0, or drop it"
            )
