"""From a name or a folder to a loaded draft, whatever its kind."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from jax.sharding import Mesh

from longspec_jax.checks import LARGEST_NUMBER, Real, Truth, Whole, Word, shown
from longspec_jax.drafters.draft import Draft, Target
from longspec_jax.drafters.kinds import (
    ARCHITECTURES,
    LONGSPEC,
    NAMED,
    SMALL_LM,
    Kind,
    is_name,
)
from longspec_jax.drafters.retrieval.draft import OPTION, RetrievalDraft, RetrievalOptions

EMBEDDING = "model.embed_tokens.weight"
"""What every language model's weights hold, and no LongSpec draft's."""
RULES = {
    bool: Truth(),
    int: Whole(0),
    float: Real(0, LARGEST_NUMBER, "0 or more"),
    str: Word(),
}
"""What options may be, by the type of their field; a dataclass of options may ask for more."""


def load_draft(
    source: str | Path,
    target: Target,
    options: Mapping[str, Any],
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> Draft:
    """Load a draft of any kind.

    With ``retrieve`` among the options it is one whose trees the target checks over retrieved
    context before it checks them whole.

    Args:
      source: the name of a kind without weights, or a folder or hub id.
      target: what it will propose for.
      options: of its kind, and those of
        :class:`longspec_jax.drafters.retrieval.RetrievalOptions`, by name.
      mesh: devices to spread it over; the first device if absent.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if there is no such draft, or one of its files is missing.
      ValueError: if an option is not its kind's, or the draft does not belong to the target.
    """
    own, retrieval = separated(options, str(source))
    draft = _load(source, target, own, mesh, revision)
    return draft if retrieval is None else RetrievalDraft(draft, target.config, retrieval)


def separated(
    options: Mapping[str, Any], draft: str
) -> tuple[Mapping[str, Any], RetrievalOptions | None]:
    """A draft's own options, and those about retrieval if there is to be any.

    Args:
      options: by name.
      draft: what it was named by, for the message.

    Raises:
      ValueError: for an option about retrieval that there is not, or that cannot be.
    """
    about = {name: value for name, value in options.items() if name.startswith(OPTION)}
    if not about:
        return options, None
    if OPTION not in about:
        raise ValueError(
            f"draft_options: {next(iter(about))} is about retrieval, which {OPTION}=4096 asks for; "
            f"name {OPTION} as well"
        )
    own = {name: value for name, value in options.items() if name not in about}
    return own, _checked(RetrievalOptions, about, f"{draft} with {OPTION}")


def _load(
    source: str | Path,
    target: Target,
    options: Mapping[str, Any],
    mesh: Mesh | None,
    revision: str | None,
) -> Draft:
    """A draft on its own."""
    if is_name(source):
        return options_of(NAMED[str(source)], options, str(source))
    from longspec_jax.weights.hub import local_folder

    folder = local_folder(source, revision)
    kind = _kind_of(folder)
    chosen = options_of(kind, options, str(source))
    return kind.load(source, target, chosen, mesh=mesh, revision=revision)


def _kind_of(folder: Path) -> Kind:
    """The kind of a folder's draft."""
    from longspec_jax.weights.checkpoint import holds
    from longspec_jax.weights.json_files import read_json

    names = read_json(folder / "config.json").texts("architectures")
    kind = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), LONGSPEC)
    # The published LongSpec drafts may name their target's architecture; they have no embedding.
    return kind if kind is not SMALL_LM or holds(folder, EMBEDDING) else LONGSPEC


def options_of(kind: Kind, values: Mapping[str, Any], draft: str) -> Any:
    """The options of a kind, checked; of a kind without weights that is the draft.

    Args:
      kind: of the draft.
      values: by name.
      draft: what it was named by, for the message.

    Raises:
      ValueError: for an option it does not have, or a value that it cannot have.
    """
    return _checked(kind.options_type, values, draft)


def _checked(options_type: type[Any], values: Mapping[str, Any], draft: str) -> Any:
    """A dataclass of options from values whose types are checked by its fields' annotations."""
    fields = {field.name: field for field in dataclasses.fields(options_type) if field.init}
    for name, value in values.items():
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise ValueError(
                f"draft_options: {shown(name)} is no option of {draft}; it has {known}"
            )
        if words := _refusal(value, fields[name].type):
            raise ValueError(f"draft_options: {name}={shown(value)} must be {words}")
    try:
        return options_type(**values)
    except ValueError as error:
        raise ValueError(f"draft_options: {error}") from error


def _refusal(value: Any, annotation: Any) -> str | None:
    """What a value must be to be in a field; None for one that will do."""
    types = set(get_args(annotation) or (annotation,))
    optional = NoneType in types
    if value is None and optional:
        return None
    [kind] = types - {NoneType}
    words = RULES[kind].refusal(value)
    return f"{words}, or left out" if words and optional else words
