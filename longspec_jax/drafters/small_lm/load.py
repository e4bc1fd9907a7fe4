"""A small language model that drafts: its options, the draft, and how it is loaded.

Target and small model must mean the same by a token id. Their tokenizers are compared; where one
comes without a tokenizer, vocabularies of one size are taken to be the same. Models of one family
are padded to different widths (Qwen2.5: 151936 and 152064), which only changes the width of the
logits.
"""

import dataclasses
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target
from longspec_jax.drafters.retrieval.working_cache import WorkingCache, WorkingCacheOptions
from longspec_jax.drafters.small_lm.drafter import SmallLMDrafter
from longspec_jax.weights.gguf.file import read_gguf
from longspec_jax.weights.gguf.tokenizer import gguf_tokenizer
from longspec_jax.weights.hf import load_target
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_model
from longspec_jax.weights.model_files import read_config


@dataclass(frozen=True)
class SmallLMOptions(WorkingCacheOptions):
    """How a small model is loaded, and how much of its cache it reads."""

    dtype: str | None = None
    """Of its parameters, activations and cache; the target's if absent."""
    context: int | None = None
    """Tokens of the longest text it will draft for, prompt and new ones; the target's whole range
    if absent. A model that was made for fewer positions is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context is not None and self.context < 1:
            raise ValueError(
                f"context={self.context} must be at least 1: it is the length in tokens of the "
                "longest text that the small model drafts for; leave it out for the target's range"
            )


@dataclass(frozen=True, eq=False)
class SmallLM(Draft):
    """A small model and its parameters."""

    config: TargetConfig
    params: Any = field(repr=False)
    """Of its :class:`longspec_jax.models.target.Target`."""
    narrower: bool = False
    """Whether the small model lacks tokens of the target."""
    working: WorkingCache | None = None
    """What a proposal reads of its cache; all of it if absent."""
    name: str = field(default="small_lm", init=False)

    @property
    def default_trees(self) -> DefaultTrees:
        """Chains and narrow trees: a level costs a forward of all its layers."""
        chain, pair, tree = TreeConfig((1, 1, 1)), TreeConfig((1, 1)), TreeConfig((4, 4, 4))
        return DefaultTrees((chain, pair), (tree, chain), (TreeConfig((4, 8, 8, 8)), chain))

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError if it has more tokens than the target, or layers that do not draft."""
        own = self.config
        capped = own.attention_cap is not None or own.attention_sinks
        if len(own.full_layers) < own.num_layers or capped:
            raise ValueError(
                f"{own.architecture} has layers with a window or a state, a soft cap, or attention "
                "sinks, and "
                "cannot be a small_lm draft; load a small model without them"
            )
        if self.config.vocab_size > target.vocab_size:
            raise ValueError(
                f"the small model has vocab_size={self.config.vocab_size}, the target "
                f"{target.vocab_size}; load a small model of the target's own family"
            )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> SmallLMDrafter:
        """The drafter that grows this tree."""
        return SmallLMDrafter(self.config, tree, attention, self.narrower, self.working)


class Tokens(NamedTuple):
    """The tokens that a tokenizer knows."""

    numbers: Mapping[str, int]
    """The id of every token."""
    special: AbstractSet[str]
    """Those that are not compared: models name them freely, and Llama 3 reserves what Llama 3.1
    uses."""


def load(
    source: str | Path,
    target: Target,
    options: SmallLMOptions = SmallLMOptions(),
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> SmallLM:
    """Load a small model.

    Args:
      source: a folder with ``config.json`` and weights, or a hub id.
      mesh: the target's devices. Each gets the whole small model: reading it takes less time than
        joining results.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if the model or one of its files is missing.
      ValueError: if it is not supported, damaged, of another tokenizer or of too short a range.
    """
    folder, dtype = local_model(source, revision), options.dtype or target.config.dtype
    config = target_config(read_config(folder), dtype)
    check_range(source, config, options.context or target.config.max_positions)
    tokens = _stored_tokens(folder), _tokens_of(target.tokenizer)
    check_vocabulary(source, config, target.config, *tokens)
    config, params = load_target(folder, dtype=dtype)
    config, params = within(config, params, target.config.vocab_size)
    if mesh is not None:
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    narrower = config.vocab_size < target.config.vocab_size
    return SmallLM(config, params, narrower, options.working_cache(target.config))


def check_range(source: str | Path, config: TargetConfig, context: int) -> None:
    """Refuse a small model that was made for fewer positions than it will meet."""
    if config.max_positions < context:
        raise ValueError(
            f"{source}: the small model was made for {config.max_positions} positions and is to "
            f"draft for texts of up to {context} tokens; beyond its range its guesses are "
            f"worthless. Load one with a longer range, or set context={config.max_positions} if "
            "no text is longer than that"
        )


def check_vocabulary(
    source: str | Path,
    config: TargetConfig,
    target: TargetConfig,
    ours: Tokens | None,
    theirs: Tokens | None,
) -> None:
    """Refuse a small model of another vocabulary than the target's.

    Args:
      ours: the small model's tokens, if they are known.
    """
    sizes = (
        f"{source}: the small model has vocab_size={config.vocab_size}, the target "
        f"{target.vocab_size}"
    )
    remedy = "load a small model of the target's own family"
    if ours is None or theirs is None:
        if config.vocab_size != target.vocab_size:
            without = "the small model" if ours is None else "the target"
            raise ValueError(
                f"{sizes}, and {without} comes without a tokenizer that could show that they "
                f"number their tokens alike; put its tokenizer.json beside it, or {remedy}"
            )
    elif difference := _difference(ours, theirs):
        raise ValueError(f"{sizes}, and their tokenizers differ: {difference}; {remedy}")


def within(config: TargetConfig, params: Any, vocab_size: int) -> tuple[TargetConfig, Any]:
    """The small model without the tokens that the target lacks, which are padding."""
    if config.vocab_size <= vocab_size:
        return config, params
    tables = {name: params[name][:vocab_size] for name in ("embedding", "head") if name in params}
    return dataclasses.replace(config, vocab_size=vocab_size), {**params, **tables}


def _difference(ours: Tokens, theirs: Tokens) -> str | None:
    """The first id for which two tokenizers have different tokens, in words."""
    special = ours.special | theirs.special
    mine, others = (
        {number: token for token, number in tokens.numbers.items() if token not in special}
        for tokens in (ours, theirs)
    )
    for number in sorted(mine.keys() | others.keys()):
        a, b = mine.get(number), others.get(number)
        if a != b:
            a, b = ("missing" if token is None else repr(token) for token in (a, b))
            return f"token {number} is {a} in the small model and {b} in the target"
    return None


def _stored_tokens(folder: Path) -> Tokens | None:
    """What a folder's ``tokenizer.json`` knows, or else its ``tokenizer.model``; or a GGUF file."""
    if folder.is_file():
        return _tokens_of(gguf_tokenizer(read_gguf(folder)))
    readers = {"tokenizer.json": _tokens_of_json, "tokenizer.model": _tokens_of_sentencepiece}
    name = next((name for name in readers if (folder / name).is_file()), None)
    if name is None:
        return None
    try:
        return readers[name](str(folder / name))
    except Exception as error:  # They raise bare Exceptions for what they cannot read.
        raise ValueError(
            f"{folder / name}: the tokenizer cannot be read ({error}); download it again, or, if "
            "it is newer than the packages here, pip install --upgrade tokenizers"
        ) from error


def _tokens_of_json(file: str) -> Tokens:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return Tokens(tokenizer.get_vocab(), special)


def _tokens_of_sentencepiece(file: str) -> Tokens:
    from sentencepiece import SentencePieceProcessor

    tokenizer = SentencePieceProcessor(model_file=file)
    numbers = range(tokenizer.get_piece_size())
    pieces = [tokenizer.id_to_piece(number) for number in numbers]
    special = {
        piece
        for number, piece in enumerate(pieces)
        if tokenizer.is_control(number) or tokenizer.is_unknown(number)
    }
    return Tokens({piece: number for number, piece in enumerate(pieces)}, special)


def _tokens_of(tokenizer: Any) -> Tokens | None:
    """What a transformers tokenizer knows."""
    if tokenizer is None:
        return None
    return Tokens(tokenizer.get_vocab(), set(tokenizer.get_added_vocab()))
