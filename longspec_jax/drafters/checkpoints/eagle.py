"""EAGLE-1 and 2 drafts as they are published, and the draft bound to its target.

``config.json`` is that of a Llama of one layer; ``bias`` tells whether the projection of embedding
and hidden state has one. What is stored in which shape says the rest.
"""

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.eagle3 import (
    FIRST_LAYER,
    USUAL_POSITIONS,
    authors_base,
    made_for,
)
from longspec_jax.drafters.checkpoints.features import (
    EMBEDDING,
    QKV,
    Described,
    FeatureFiles,
    llama_rules,
    without_prefix,
)
from longspec_jax.drafters.eagle import EagleConfig, EagleDraft, EagleOptions, EagleParams
from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.hf_config import LAYER, REFUSED, check_refused, layer_fields
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.rope import rope_scaling
from longspec_jax.weights.tables import ROTARY, Rule, Table, bind, layer_sizes

_FUSE = (Rule("fuse/kernel", "C D", (("fc.weight", "D C"),)),)
_FUSE_BIAS = (Rule("fuse/bias", "D", (("fc.bias", "D"),)),)


def draft_table(config: EagleConfig, *, embedding: bool) -> Table:
    """The tensors of a draft, maybe with an embedding of its own."""
    sizes = layer_sizes(config) | {"C": 2 * config.model_width, "V": config.vocab_size}
    layer = QKV, *llama_rules(config)
    others = _FUSE + _FUSE_BIAS * config.fuse_bias + EMBEDDING * embedding
    leaves = [bind(rule, sizes, theirs=FIRST_LAYER) for rule in layer]
    return Table((*leaves, *(bind(rule, sizes) for rule in others)), ROTARY)


def _described(
    raw: JsonObject, tensors: Tensors, target: TargetConfig, options: EagleOptions
) -> Described[EagleConfig]:
    tensors = without_prefix(tensors)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    raw.require(sizes, "an EAGLE draft")
    check_refused(raw, REFUSED)
    if raw.whole("num_hidden_layers", 1) != 1:
        raise raw.error("num_hidden_layers", "is not supported: one layer is", "load another draft")
    found, scaling = layer_fields(raw), rope_scaling(raw)
    vocabulary = raw.whole("vocab_size")
    found |= dict(
        target_width=found["model_width"],
        vocab_size=vocabulary,
        proposable=vocabulary,
        features=(target.num_layers,),
        max_positions=raw.whole("max_position_embeddings", USUAL_POSITIONS),
        rope_theta=options.rope_theta or authors_base(raw, scaling),
        rope_scaling=scaling,
        dtype=target.dtype,
        qkv_bias=f"{FIRST_LAYER}self_attn.q_proj.bias" in tensors,
        normed_head=False,
        fuse_bias="fc.bias" in tensors,
    )
    config = raw.build(EagleConfig, found, LAYER)
    table = draft_table(config, embedding="embed_tokens.weight" in tensors)
    return Described(config, table, tensors)


load = FeatureFiles(_described, EagleParams.bound, EagleDraft.bind, EagleOptions, made_for).load
