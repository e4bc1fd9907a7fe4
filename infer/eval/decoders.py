"""How a method decodes a group of prompts, and what it tells of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from longspec_jax import LongSpec, TreeConfig
from longspec_jax.drafters.draft import Draft
from longspec_jax.generation.activity import OnActivity

from .methods import Chosen
from .records import Breakdown, RoundTree, Setting
from .trees import round_trees


@dataclass(frozen=True)
class Decoded:
    """One row."""

    tokens: tuple[int, ...]
    text: str
    emitted_by_round: tuple[int, ...]
    accepted_by_round: tuple[int, ...]
    target_passes: int | None


@dataclass(frozen=True)
class DecodedGroup:
    """The rows of one call and the seconds that they share."""

    rows: tuple[Decoded, ...]
    prefill_s: float
    decode_s: float
    compile_s: float


@dataclass(frozen=True)
class Request:
    """What is asked of all rows of a group."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_new_tokens: Sequence[int]
    """Of every row."""
    stop_tokens: Sequence[int]

    @property
    def options(self) -> dict[str, Any]:
        """As the library takes them."""
        filters = {"top_k": self.top_k, "top_p": self.top_p} if self.temperature > 0 else {}
        return {
            "temperature": self.temperature,
            "seed": self.seed,
            "eos_token_id": list(self.stop_tokens),
            **filters,
        }

    def of_row(self, row: int) -> "Request":
        """What is asked of one of them."""
        return replace(self, max_new_tokens=[self.max_new_tokens[row]])


class Decoder(Protocol):
    """A method, ready to decode."""

    @property
    def name(self) -> str:
        """Of the method."""
        ...

    @property
    def setting(self) -> Setting:
        """What it runs with."""
        ...

    def decode(
        self, prompts: Sequence[list[int]], request: Request, on_activity: OnActivity
    ) -> DecodedGroup:
        """Decode the rows of a group as one call."""
        ...

    def draws_like_plain(self, temperature: float) -> bool:
        """Whether it draws from plain decoding's random stream, so that texts can be compared."""
        ...

    def breakdown(
        self, prompts: Sequence[list[int]], request: Request, rounds: int
    ) -> Breakdown | None:
        """Seconds of the parts of so many rounds; None where they cannot be told apart."""
        ...

    def trees(
        self, prompt: list[int], request: Request, emitted: Sequence[int]
    ) -> tuple[RoundTree, ...] | None:
        """The trees of the first rounds of one row; None where there are none to be seen.

        Args:
          prompt: of the row.
          request: of the row.
          emitted: how many tokens each of these rounds emitted.
        """
        ...

    def pieces(self, prompt: list[int], tokens: Sequence[int]) -> tuple[str, ...] | None:
        """The text of a row by token."""
        ...


@dataclass(frozen=True)
class LibraryDecoder:
    """A method of this library."""

    name: str
    setting: Setting
    spec: LongSpec
    """With the method's draft alone."""
    tree: TreeConfig | None
    adaptive: bool

    @classmethod
    def of(
        cls, chosen: Chosen, draft: Draft | None, spec: LongSpec, source: str | None, options: Any
    ) -> "LibraryDecoder":
        """A method of loaded models.

        Args:
          chosen: the method.
          draft: its draft; None for none.
          spec: the target, with any drafts.
          source: how the draft was named.
          options: of the draft's kind, as they were named.
        """
        import jax

        tree = chosen.tree(draft, jax.default_backend() == "cpu")
        setting = Setting(
            source,
            None if tree is None or not tree.widths else str(tree),
            None if tree is None else tree.num_nodes,
            dict(options)
            if draft is not None and (draft.own_params or len(spec.drafts) == 1)
            else {},
        )
        own = replace(spec, draft=draft)
        if chosen.method.attention is not None:
            # An attention that reads all slots of a cache is not handed more than it needs.
            own = replace(own, attention=chosen.method.attention, expected_tokens=0)
        return cls(chosen.name, setting, own, tree, chosen.method.adaptive)

    def decode(
        self, prompts: Sequence[list[int]], request: Request, on_activity: OnActivity
    ) -> DecodedGroup:
        """Decode the rows of a group as one call."""
        found = self.spec.generate(
            [list(prompt) for prompt in prompts],
            tree=self.tree,
            adaptive=self.adaptive,
            on_activity=on_activity,
            max_new_tokens=list(request.max_new_tokens),
            **request.options,
        )
        stats = found.stats
        rows = zip(found.sequences, found.text, found.drafted, stats.target_passes, strict=True)
        return DecodedGroup(
            tuple(
                Decoded(tokens, text or "", *by_round(drafted), passes)
                for tokens, text, drafted, passes in rows
            ),
            stats.prefill_seconds,
            stats.decode_seconds,
            stats.compile_seconds,
        )

    def draws_like_plain(self, temperature: float) -> bool:
        """Always: the target's own draws walk every tree."""
        return True

    def breakdown(
        self, prompts: Sequence[list[int]], request: Request, rounds: int
    ) -> Breakdown | None:
        """Seconds of the parts of so many rounds; none of adaptive ones, which differ."""
        if self.tree is None:
            return None
        parts = self.spec.breakdown(
            [list(prompt) for prompt in prompts],
            tree=self.tree,
            rounds=rounds,
            max_new_tokens=list(request.max_new_tokens),
            **request.options,
        )
        return Breakdown(parts.draft, parts.verify, parts.commit, parts.rounds)

    def trees(
        self, prompt: list[int], request: Request, emitted: Sequence[int]
    ) -> tuple[RoundTree, ...] | None:
        """The trees of the first rounds of one row; none where a round chooses its own."""
        if self.tree is None or not self.tree.widths:
            return None
        views = self.spec.inspect(
            [prompt],
            tree=self.tree,
            max_new_tokens=list(request.max_new_tokens),
            **request.options,
        )
        return round_trees(views, self.spec.tokenizer, emitted)

    def pieces(self, prompt: list[int], tokens: Sequence[int]) -> tuple[str, ...] | None:
        """The text of a row by token."""
        from longspec_jax.generation.text import Detokenizer

        text = Detokenizer(self.spec.tokenizer, prompt)
        pieces = [text.push(token) for token in tokens]
        return (*pieces[:-1], pieces[-1] + text.flush())


def by_round(drafted: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of every target pass, and the draft tokens among them.

    A pass ends with the token that no draft proposed; the last one may have been cut before it,
    and all of its tokens are the draft's then.

    Args:
      drafted: of every emitted token, the prefill's first.
    """
    emitted, accepted = [], []
    count = 0
    for draft in drafted[1:]:
        count += 1
        if not draft:
            emitted.append(count)
            accepted.append(count - 1)
            count = 0
    if count:
        emitted.append(count)
        accepted.append(count)
    return tuple(emitted), tuple(accepted)
