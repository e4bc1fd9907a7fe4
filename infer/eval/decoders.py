"""How a method decodes a group of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from longspec_jax import GenerateResult, LongSpec, TreeConfig
from longspec_jax.cli import as_options
from longspec_jax.config.sampling import GenerateOptions
from longspec_jax.drafters.joined import JoinedDraft
from longspec_jax.generation.activity import OnActivity

from .config import EvalConfig
from .methods import JOINED, by_kind, with_drafts
from .records import Setting


@dataclass(frozen=True)
class Decoder:
    """A method, ready to decode."""

    name: str
    setting: Setting
    spec: LongSpec
    """With only the method's draft."""
    tree: TreeConfig | None
    """None if every call chooses."""
    adaptive: bool

    def decode(
        self, prompts: Sequence[list[int]], options: GenerateOptions, on_activity: OnActivity
    ) -> GenerateResult:
        """Decode the rows of a group as one call."""
        return self.spec.generate(
            [*prompts],
            tree=self.tree,
            adaptive=self.adaptive,
            on_activity=on_activity,
            **options,
        )


def ready_decoders(config: EvalConfig, spec: LongSpec) -> list[Decoder]:
    """The methods of a run, ready to decode.

    Args:
      config: of the run.
      spec: with all its drafts.

    Raises:
      ValueError: for a method without its draft, or two drafts of one kind.
    """
    # Lookup that joined them by itself is after those that were named.
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
        members = draft.members if isinstance(draft, JoinedDraft) else draft
        own = replace(spec, draft=members)
        if method.attention is not None:
            # Attention that reads every slot of a cache gets no more slots than it needs.
            own = replace(own, attention=method.attention, expected_tokens=0)
        found.append(Decoder(chosen.name, setting, own, tree, method.adaptive))
    return found
