"""How a small language model that drafts is loaded, and when its vocabulary is its target's.

Target and small model must mean the same by a token id. Their tokenizers are compared; where one
comes without a tokenizer, vocabularies of one size are taken to be the same. Models of one family
are padded to different widths (Qwen2.5: 151936 and 152064), which only changes the width of the
logits.
"""

import dataclasses
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from longspec_jax.checks import Tokenizer
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.small_lm import SmallLM, SmallLMOptions
from longspec_jax.models.target import head_of
from longspec_jax.weights.gguf.file import read_gguf
from longspec_jax.weights.gguf.tokenizer import gguf_tokenizer
from longspec_jax.weights.hf import load_target
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_model
from longspec_jax.weights.model_files import read_config


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
    options: SmallLMOptions = SmallLMOptions(),  # noqa: B008 - frozen.
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
                f"number their tokens alike; put its tokenizer.json next to it, or {remedy}"
            )
    elif difference := _difference(ours, theirs):
        raise ValueError(f"{sizes}, and their tokenizers differ: {difference}; {remedy}")


def within(config: TargetConfig, params: PyTree, vocab_size: int) -> tuple[TargetConfig, Any]:
    """The small model without the tokens that the target lacks, which are padding."""
    if config.vocab_size <= vocab_size:
        return config, params
    tables = {"embedding": params["embedding"][:vocab_size]}
    if "head" in params:
        tables["head"] = head_of(params)[:vocab_size]
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


def _tokens_of(tokenizer: Tokenizer | None) -> Tokens | None:
    """What a transformers tokenizer knows."""
    if tokenizer is None:
        return None
    return Tokens(tokenizer.get_vocab(), set(tokenizer.get_added_vocab()))
