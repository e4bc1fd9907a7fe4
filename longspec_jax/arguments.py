"""Checks of the arguments of ``LongSpec``, made before anything is read or computed.

One table of rules for the constructors and calls; how models are loaded is declared in
:mod:`longspec_jax.config.loading`. The generation options of a call are checked by
:mod:`longspec_jax.generation.options`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jax.sharding import Mesh

from longspec_jax.checks import Maybe, Rule, That, Truth, Whole, as_plain, shown, whole_number
from longspec_jax.config.loading import OPTIONS
from longspec_jax.config.names import MESH_AXES
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import PLAIN, TreeConfig, tree_widths
from longspec_jax.drafters.draft import Draft
from longspec_jax.drafters.registry import NAMED, OWN, is_name

LARGEST_CHUNK = 2048
"""Most tokens of one prefill step, unless the target has more positions."""
LONGEST_SOURCE = 4096
"""Characters of a path that operating systems take."""


def _is_source(value: object) -> bool:
    text = str(value)
    return isinstance(value, str | Path) and 0 < len(text) <= LONGEST_SOURCE and "\0" not in text


def _is_tokenizer(value: object) -> bool:
    return callable(value) and hasattr(value, "decode") and not isinstance(value, type)


def _is_streamer(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("put", "end"))


def _is_options(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


_SOURCE = "a folder or the name of a repository on the Hugging Face hub"
_CALLBACK = Maybe(That(callable, "a function of one argument"))
ARGUMENTS: dict[str, Rule] = {
    **{name: option.rule for name, option in OPTIONS.items()},
    "target_config": That(lambda value: isinstance(value, TargetConfig), "a TargetConfig"),
    "target": That(_is_source, _SOURCE),
    "draft": That(
        lambda value: all(map(_is_source, as_sources(value))),
        f"{_SOURCE}, or {', '.join([*NAMED, OWN])}; or a list of these",
    ),
    "draft_options": Maybe(
        That(_is_options, 'options of the draft by name, such as {"int8": True}')
    ),
    "mesh": Maybe(
        That(
            lambda value: isinstance(value, Mesh) and value.axis_names == MESH_AXES,
            f"a mesh with the axes {', '.join(MESH_AXES)}, such as longspec_jax.make_mesh(tp=4)",
        )
    ),
    "tokenizer": Maybe(
        That(
            _is_tokenizer,
            "a tokenizer, as transformers.AutoTokenizer.from_pretrained(...) returns it",
        )
    ),
    "prefill_chunk": Whole(),  # Of a model that is loaded.
    "expected_tokens": Whole(0),
    **dict.fromkeys(("adaptive", "output_scores", "output_logits", "return_trees"), Truth()),
    "streamer": Maybe(
        That(_is_streamer, "a transformers streamer, an object with the methods put and end")
    ),
    "on_round": _CALLBACK,
    "on_activity": _CALLBACK,
}
"""The rules of all arguments of constructors and calls."""


def refuse_beside_offload(offload: bool, mesh: Mesh | None, max_num_seqs: int | None) -> None:
    """Refuse what a cache in the host's memory does not support.

    Raises:
      ValueError: names the arguments.
    """
    if offload and mesh is not None:
        raise ValueError(
            f"offload=True supports one device, and mesh={dict(mesh.shape)} spreads the cache over "
            "several; drop one of the two"
        )
    if offload and max_num_seqs is not None:
        raise ValueError(
            f"offload=True decodes all rows at once, and max_num_seqs={max_num_seqs} has some of "
            "them wait; drop one of the two"
        )


def as_sources(draft: object) -> tuple[Any, ...]:
    """The drafts that an argument names, one or several."""
    if draft is None:
        return ()
    return tuple(draft) if isinstance(draft, list | tuple) and draft else (draft,)


def check_about_drafts(
    sources: Sequence[Any], options: Mapping[str, Any] | None, revision: str | None
) -> None:
    """Refuse options of a draft without a draft, and a revision without a draft with weights.

    Raises:
      ValueError: names the argument.
    """
    named = [source for source in sources if not is_name(source)]
    if options and not sources:
        raise ValueError(
            f"draft_options={dict(options)} are about a draft, and none is named; pass draft= as "
            "well"
        )
    if revision is not None and not named:
        raise ValueError(
            f"draft_revision={revision!r} is the version of a draft with weights, and none is "
            "named; pass draft= as well"
        )


def check_drafts(drafts: Sequence[Any]) -> None:
    """Refuse values that are not loaded drafts, two drafts of a kind, and a lossy one among others.

    Raises:
      ValueError: names the value.
    """
    for draft in drafts:
        if not isinstance(draft, Draft):
            raise ValueError(
                f"draft={shown(draft)} must be a loaded draft, such as LongSpecDraft.bind(...) or "
                "NgramDraft(); LongSpec.from_pretrained loads them from folders"
            )
    if len(drafts) > 1 and not all(draft.drafter(PLAIN).lossless for draft in drafts):
        raise ValueError(
            "draft: retrieve_verify=partial changes the text, which must not depend on what turns "
            "out fastest; name that draft alone"
        )
    if len(drafts) > 1 and not all(draft.joins for draft in drafts):
        raise ValueError(
            "draft: partial verification (retrieve=) proposes a single path, so that no other "
            "draft joins it; name that draft alone, and lookup inside it: retrieve_tree=4,8~8"
        )
    names = [draft.name for draft in drafts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"draft holds two of the kind {twice}; name one of each kind")


def check_chunk(prefill_chunk: int, max_positions: int) -> None:
    """Refuse a prefill step longer than any prompt of this target.

    Raises:
      ValueError: names the argument.
    """
    most = max(LARGEST_CHUNK, max_positions)
    if prefill_chunk > most:
        raise ValueError(
            f"prefill_chunk={prefill_chunk} is longer than any prompt of this target "
            f"(max_positions={max_positions}); pass at most {most}"
        )


def check_gap(tokens: object, plain: object, other: object, vocab_size: int) -> list[int]:
    """Check a row of tokens and two candidates for its next token.

    Returns:
      The tokens of the row.

    Raises:
      ValueError: names the argument.
    """
    row = as_plain(tokens)
    if isinstance(row, str | bytes) or not isinstance(row, Sequence) or len(row) < 2:
        raise ValueError(
            f"tokens={shown(tokens)} must be the token ids of one row, prompt and text, at least 2"
        )
    whole_number("plain", plain, 0, vocab_size - 1)
    whole_number("other", other, 0, vocab_size - 1)
    return [whole_number("tokens", token, 0, vocab_size - 1) for token in row]


def refuse_pickling(self: object) -> NoReturn:
    """Refuse to pickle or copy a loaded model; the ``__getstate__`` of its class.

    Raises:
      TypeError: always.
    """
    raise TypeError(
        f"a {type(self).__name__} cannot be pickled or copied, as it holds arrays of the device "
        "and compiled programs; load it again in the other process, or use dataclasses.replace "
        "for one with other settings"
    )


def as_tree(value: TreeConfig | Sequence[int] | str) -> TreeConfig:
    """A tree from a TreeConfig, its text, or the widths of its levels.

    Raises:
      ValueError: for anything else.
    """
    if isinstance(value, str):
        return TreeConfig.parse(value)
    return value if isinstance(value, TreeConfig) else TreeConfig(tree_widths(value))
