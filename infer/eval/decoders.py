"""How a method decodes a group of prompts, and what its rounds looked like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from longspec_jax import GenerateResult, LongSpec, TreeConfig
from longspec_jax.cli import as_options
from longspec_jax.config.tree import PLAIN
from longspec_jax.decoding import report as verified
from longspec_jax.generation.activity import OnActivity
from longspec_jax.generation.endpoint import Endpoint, RemoteResult
from longspec_jax.generation.text import Detokenizer

from .config import EvalConfig
from .methods import JOINED, SERVED, by_kind, with_drafts
from .records import PLAIN_METHOD, Breakdown, RoundTree, Setting, Stop

Options = Mapping[str, Any]
"""Of ``LongSpec.generate``, for all rows of a call."""


@dataclass(frozen=True)
class Decoder:
    """A method, ready to decode."""

    name: str
    setting: Setting
    spec: LongSpec | Endpoint
    """With the method's draft alone, or a server."""
    tree: TreeConfig | None
    """None if every call chooses."""
    adaptive: bool

    def decode(
        self, prompts: Sequence[list[int]], options: Options, on_activity: OnActivity, trees: bool
    ) -> GenerateResult | RemoteResult:
        """Decode the rows of a group as one call, which returns its trees if it is asked for."""
        if isinstance(self.spec, Endpoint):
            return self.spec.generate(prompts, tree=self.tree, **options)
        return self.spec.generate(
            [*prompts],
            tree=self.tree,
            adaptive=self.adaptive,
            on_activity=on_activity,
            return_trees=trees and self.keeps_trees,
            **options,
        )

    @property
    def keeps_trees(self) -> bool:
        """Whether its rounds have trees, and one shape all."""
        return self.tree is not None and self.tree.num_levels > 0 and not self.is_remote

    @property
    def is_remote(self) -> bool:
        """Whether a server decodes."""
        return isinstance(self.spec, Endpoint)

    def breakdown(
        self, prompts: Sequence[list[int]], options: Options, rounds: int
    ) -> Breakdown | None:
        """Seconds of the parts of some rounds; None for adaptive rounds, which differ."""
        if self.tree is None or isinstance(self.spec, Endpoint):
            return None
        parts = self.spec.breakdown([*prompts], tree=self.tree, rounds=rounds, **options)
        return Breakdown(parts.draft, parts.verify, parts.commit, parts.rounds)


def text_by_token(tokenizer: Any, prompt: list[int], tokens: Sequence[int]) -> tuple[str, ...]:
    """The text of a row, in a piece for every token."""
    text = Detokenizer(tokenizer, prompt)
    pieces = [text.push(token) for token in tokens]
    return (*pieces[:-1], pieces[-1] + text.flush())


def round_trees(
    trees: Sequence[verified.RoundTree],
    tokenizer: Any,
    prompt_tokens: int,
    emitted: Sequence[int],
) -> tuple[RoundTree, ...]:
    """The first rounds of a row as they are kept; an accepted path may reach beyond the text's end.

    Args:
      trees: of the row's rounds, in order.
      tokenizer: of the target.
      prompt_tokens: of the row.
      emitted: tokens of the rounds that are kept.
    """
    found, position = [], prompt_tokens
    for tree, count in zip(trees, emitted, strict=False):
        path = tree.path[:count]
        has_children = any(parent == path[-1] for parent in tree.parents[1:])
        stop: Stop = "not proposed" if has_children else "nothing below"
        found.append(
            RoundTree(
                position=position,
                tokens=tree.tokens,
                texts=tuple(tokenizer.decode([token]) for token in tree.tokens),
                parents=tree.parents,
                drawn=tree.draws,
                drawn_texts=tuple(tokenizer.decode([token]) for token in tree.draws),
                path=path,
                stop="ended" if count < len(tree.path) else stop,
            )
        )
        position += count
    return tuple(found)


def ready_decoders(config: EvalConfig, spec: LongSpec) -> list[Decoder]:
    """The methods of a run, ready to decode.

    Args:
      config: of the run.
      spec: with all its drafts.

    Raises:
      ValueError: for a method without its draft, or two drafts of one kind.
    """
    # Lookup that joined them by itself is behind those that were named.
    own_drafts = spec.drafts[: len(config.drafts)]
    names = dict(zip(by_kind(own_drafts), config.drafts, strict=True))
    names[JOINED] = "+".join(each.name for each in spec.drafts)
    found: list[Decoder] = []
    for chosen, draft in with_drafts(config.method, own_drafts):
        method = chosen.method
        tree = chosen.tree(draft, jax.default_backend() == "cpu")
        has_options = draft is not None and (draft.own_params or len(own_drafts) == 1)
        setting = Setting(
            None if method.kind is None else names[method.kind],
            None if tree is None or not tree.num_levels else str(tree),
            None if tree is None else tree.num_nodes,
            as_options(config.models.draft_option) if has_options else {},
        )
        own = replace(spec, draft=draft)
        if method.attention is not None:
            # Attention that reads every slot of a cache gets no more slots than it needs.
            own = replace(own, attention=method.attention, expected_tokens=0)
        found.append(Decoder(chosen.name, setting, own, tree, method.adaptive))
    return found


def remote_decoders(server: Endpoint) -> list[Decoder]:
    """The methods of an :class:`Endpoint`: without its draft, and with it."""
    setting = Setting(None, None, None, {})
    trees = {PLAIN_METHOD: PLAIN, SERVED: None}
    return [Decoder(name, setting, server, tree, False) for name, tree in trees.items()]
