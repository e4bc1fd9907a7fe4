"""LongSpec drafts in the format of the release: ``config.json``, 20 tensors, in and out."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, PyTree

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.features import QKV, QKV_BIAS, SELF_OUT
from longspec_jax.drafters.checkpoints.vocabulary import load_draft_vocabulary
from longspec_jax.drafters.draft import (
    LIKELY_TOKENS,
    Target,
    pays_in_fewer_tokens,
    pays_in_int8,
)
from longspec_jax.drafters.longspec import (
    WINDOW,
    DraftConfig,
    LongSpecDraft,
    LongSpecOptions,
    check_vocab_size,
)
from longspec_jax.drafters.vocabulary import first_merged
from longspec_jax.models.target import shares_head
from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.families import FAMILIES
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.hf_config import (
    LAYER,
    PARTIAL,
    REFUSED,
    check_dtype,
    check_refused,
    layer_fields,
    raw_layer,
)
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.params import write_model
from longspec_jax.weights.rope import (
    INTERLEAVED,
    ROPE_KEYS,
    raw_rope,
    rope_scaling,
    rope_theta,
    rotary_width,
)
from longspec_jax.weights.tables import MLP, ROTARY, Rule, Table, bind, layer_sizes, stored_shape

ARCHITECTURE = "LongSpecDraft"
"""What our exports name as their architecture. The published drafts carry their target's file."""

LAYER_RULES = (
    Rule("self_norm/scale", "D", (("input_layernorm.weight", "D"),)),
    QKV,
    QKV_BIAS,
    SELF_OUT,
    Rule("cross_norm/scale", "D", (("post_self_attention_layernorm.weight", "D"),)),
    Rule("cross_q/kernel", "D N H", (("cross_attn.q_proj.weight", "(N H) D"),)),
    Rule("cross_q/bias", "N H", (("cross_attn.q_proj.bias", "(N H)"),)),
    Rule("cross_out/kernel", "N H D", (("cross_attn.o_proj.weight", "D (N H)"),)),
    Rule("mlp_norm/scale", "D", (("post_cross_attention_layernorm.weight", "D"),)),
    *MLP,
)
_DEAD = (
    ("cross_attn.k_proj.weight", "(K H) D"),
    ("cross_attn.k_proj.bias", "(K H)"),
    ("cross_attn.v_proj.weight", "(K H) D"),
    ("cross_attn.v_proj.bias", "(K H)"),
)
"""Stored by the release and never read: cross-attention reads the target's keys and values."""
_OF_TARGETS = frozenset(INTERLEAVED).union(*(family.accepts for family in FAMILIES.values()))
"""Keys of targets about their rotary embedding: the published drafts carry their target's file."""
_PREFIXES = ("", "glide.", "draft_model.", "model.")
"""Prefixes that the classes of the release put before the draft's names."""


def load_draft(
    source: str | Path,
    target: TargetConfig,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> tuple[DraftConfig, Any]:
    """Load a draft in the format of the LongSpec release.

    The tensors are ``self_attn.{q,k,v,o}_proj`` (q, k and v with biases), ``cross_attn.{q,o}_proj``
    (q with a bias), ``mlp.{gate,up,down}_proj``, and the norms ``input_layernorm``,
    ``post_self_attention_layernorm`` and ``post_cross_attention_layernorm``. Keys and values of the
    cross-attention come from the target: ``cross_attn.{k,v}_proj`` are not read.

    Args:
      source: a folder with ``config.json`` and weights, or a hub id.
      dtype: to which the weights are cast; the target's dtype if absent, because the draft computes
        on the target's embeddings and keys.
      mesh: devices to shard over by the project's rules; the first device if absent.
      revision: branch, tag or commit of a hub id.

    Returns:
      The configuration, and the parameters of
      :class:`~longspec_jax.drafters.longspec.LongSpecLayer`.

    Raises:
      FileNotFoundError: if the draft or one of its files is missing.
      ValueError: if the draft does not belong to the target, or its files are damaged or do not fit
        together.
    """
    with open_folder(source, mesh, revision) as folder:
        config = draft_config(folder.raw, target, dtype)
        config.check_fits(target)
        tensors = without_prefix(folder.tensors)
        return config, folder.params(draft_table(config), tensors, config.dtype)


def save_draft(
    folder: str | Path, config: DraftConfig, params: PyTree, *, target: TargetConfig | None = None
) -> None:
    """Save a draft in the format of the LongSpec release; tensors that nothing reads are zeros.

    Args:
      folder: made if absent; weights in it are replaced, other files stay.
      target: its target; recorded, so that loading it with another vocabulary is refused.
    """
    raw = hf_draft_config(config, target)
    write_model(Path(folder).expanduser(), draft_table(config), params, config.dtype, raw)


def draft_config(raw: JsonObject, target: TargetConfig, dtype: str | None = None) -> DraftConfig:
    """The draft that a ``config.json`` describes; what the file leaves out follows the target.

    Args:
      raw: the parsed file, in the dialect of a target's.
      target: the target the draft will work with.
      dtype: of parameters and activations; the target's if absent, whatever the file says, because
        the draft computes on the target's embeddings and keys.

    Raises:
      ValueError: if the file describes a draft for another vocabulary, or an unknown rotary
        scaling.
    """
    with raw.named():
        check_vocab_size(raw.whole("vocab_size", target.vocab_size), target)
    copied = target.num_layers if ARCHITECTURE not in raw.texts("architectures") else 1
    if raw.whole("num_hidden_layers", 1) not in (1, copied):
        raise raw.error("num_hidden_layers", "must be 1: a LongSpec draft has one layer")
    return layer_config(raw, target, dtype)


def layer_config(raw: JsonObject, target: TargetConfig, dtype: str | None = None) -> DraftConfig:
    """The layer that a draft's ``config.json`` describes; arguments and errors as above."""
    # The release's drafts have biases, though their file may say that the target has none.
    check_refused(raw, REFUSED, (PARTIAL,))
    # The published drafts divide width by heads; ours may name a head width, as Qwen3 needs.
    found = layer_fields(raw, target)
    scaling = rope_scaling(raw, _OF_TARGETS)
    if any(map(raw.has, ROPE_KEYS)):
        found |= {"rope_theta": rope_theta(raw), "rope_scaling": scaling}
        found |= {"rotary_width": rotary_width(raw, found["head_width"])}
    found |= {"dtype": check_dtype(dtype or target.dtype)}
    found |= {"window": raw.whole("longspec_window", WINDOW)}
    return raw.build(partial(replace, DraftConfig.for_target(target)), found, LAYER)


def hf_draft_config(config: DraftConfig, target: TargetConfig | None = None) -> dict[str, Any]:
    """A ``config.json`` for an exported draft, readable as a Llama or Qwen2 configuration.

    Args:
      target: its target, if known: records the vocabulary, so that a wrong pairing is noticed.
    """
    family = FAMILIES.get(target.architecture) if target else None
    return {
        "architectures": [ARCHITECTURE],
        "model_type": family.model_type if family else "llama",
        **({"vocab_size": target.vocab_size} if target else {}),
        **({"max_position_embeddings": target.max_positions} if target else {}),
        "num_hidden_layers": 1,
        **raw_layer(config),
        "torch_dtype": config.dtype,
        "longspec_window": config.window,
        **raw_rope(config.rotary, config.head_width),
    }


def draft_table(config: DraftConfig) -> Table:
    """The table of a draft: the 20 tensors of the released format, without a prefix."""
    sizes = layer_sizes(config)
    dead = {name: stored_shape(axes, sizes) for name, axes in _DEAD}
    return Table(tuple(bind(rule, sizes) for rule in LAYER_RULES), ROTARY, dead)


def without_prefix(tensors: Tensors) -> Tensors:
    """The tensors under the names of the released format, whichever prefix they carry."""

    def carried(prefix: str) -> int:
        return sum(name.startswith(f"{prefix}cross_attn.") for name in tensors)

    prefix = max(_PREFIXES, key=carried)

    def stripped(name: str) -> str:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
        # No name of the format, so that it is reported and does not replace the draft's own.
        return f"{name} (next to {prefix}*)"

    return {stripped(name): tensor for name, tensor in tensors.items()}


def load(
    source: str | Path,
    target: Target,
    options: LongSpecOptions,
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> LongSpecDraft:
    """Load a draft in the format of the LongSpec release, from a folder or a hub id.

    Raises:
      FileNotFoundError: if the draft, one of its files or its table of tokens is missing.
      ValueError: if it does not belong to the target, or a file is damaged.
    """
    vocabulary = None
    if options.vocabulary not in (None, target.config.vocab_size):
        limits = target.config.vocab_size, options.vocabulary
        vocabulary = load_draft_vocabulary(source, *limits, revision=revision)
    # On a mesh rows of the LM head are cut, and a quantised one would be kept twice.
    own_tokens = mesh is None and shares_head(target.params)
    if vocabulary is None and own_tokens and options.vocabulary is None:
        vocabulary = _first_merged(target)
    config, layer = load_draft(
        source, target.config, dtype=target.config.dtype, mesh=mesh, revision=revision
    )
    return LongSpecDraft.bind(
        config,
        layer,
        target.params,
        vocabulary=vocabulary,
        own_tokens=own_tokens and vocabulary is not None,
        int8=pays_in_int8(target) if options.int8 is None else options.int8,
        working=options.working_cache(target.config),
        mesh=mesh,
    )


def _first_merged(target: Target) -> Int[np.ndarray, " v"] | None:
    """The tokens that the target's tokenizer learned first, where reading fewer pays; else None."""
    if target.tokenizer is None or not pays_in_fewer_tokens(target):
        return None
    return first_merged(target.tokenizer, LIKELY_TOKENS)
