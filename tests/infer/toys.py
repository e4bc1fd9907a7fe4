"""A toy tokenizer whose tokens are single bytes, and toy models that speak it.

Its few symbols include the parts of two- and three-byte characters, so that a random model keeps
emitting incomplete UTF-8, and so few that a random draft's tree often holds the next token.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longspec_jax import LongSpec, TreeConfig
from longspec_jax.drafters.checkpoints.longspec import save_draft
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDraft, LongSpecLayer
from longspec_jax.models.target import Target
from longspec_jax.weights import hf
from tests.kit import tiny_target_config

ALPHABET = "abcdfgh \né€"
STOP = 0
TREE = TreeConfig((4, 5))


@functools.cache
def toy_tokenizer() -> Any:
    """A byte-level tokenizer of 15 tokens; id 0 ends a text."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(symbols, _)] = whole.pre_tokenize_str(ALPHABET)
    vocabulary = {"<end>": STOP}
    for symbol in symbols:
        vocabulary.setdefault(symbol, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@functools.cache
def toy_spec(window: int = 37, **target: Any) -> LongSpec:
    """Random models of the tokenizer's vocabulary."""
    config = tiny_target_config(**{"vocab_size": 17, "num_layers": 1, **target})
    draft = DraftConfig.for_target(config, window=window)
    tokens = jnp.zeros((1, 2), jnp.int32)
    embedded = jnp.zeros((1, 2, config.model_width))
    init = partial(Target(config).init, method="initialize")
    init_draft = LongSpecLayer(draft).init
    params = _random_params(lambda key: init(key, tokens), seed=0)
    layer = _random_params(lambda key: init_draft(key, embedded, tokens, _first, _first), seed=1)
    return LongSpec(
        config,
        params,
        LongSpecDraft.bind(draft, layer, params),
        tokenizer=toy_tokenizer(),
        stop_tokens=(STOP,),
        tree=TREE,
        prefill_chunk=32,
    )


def _first(q: Any, *others: Any) -> Any:
    """Attention that returns its queries: enough to find the shapes of the parameters."""
    return q


def _random_params(init: Callable[[jax.Array], Any], seed: int) -> Any:
    """Random values in the shapes of a module; drawn by NumPy, which compiles nothing."""
    random = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> jax.Array:
        name = path[-1].key
        values = random.normal(size=leaf.shape) * (0.3 if name in ("scale", "bias") else 0.08)
        return jnp.asarray(values + (name == "scale"), leaf.dtype)

    shapes = jax.eval_shape(init, jax.random.key(0))["params"]
    return jax.tree_util.tree_map_with_path(draw, shapes)


def bound_draft(spec: LongSpec) -> LongSpecDraft:
    """The one LongSpec draft of loaded models."""
    [draft] = spec.drafts
    assert isinstance(draft, LongSpecDraft)
    return draft


def rebound(spec: LongSpec, layer: Any = None, **options: Any) -> LongSpec:
    """The same models, their draft with another layer or other options."""
    draft = bound_draft(spec)
    layer = draft.params.layer if layer is None else layer
    bound = LongSpecDraft.bind(draft.config, layer, spec.target_params, mesh=spec.mesh, **options)
    return dataclasses.replace(spec, draft=bound)


def save_toy(folder: Path) -> tuple[Path, Path]:
    """Write the toy as Hugging Face folders: target with tokenizer, and draft."""
    spec = toy_spec()
    target, draft = folder / "target", folder / "draft"
    hf.save_target(target, spec.target_config, spec.target_params, stop_tokens=(STOP,))
    toy_tokenizer().save_pretrained(target)
    bound = bound_draft(spec)
    save_draft(draft, bound.config, bound.params.layer, target=spec.target_config)
    return target, draft
