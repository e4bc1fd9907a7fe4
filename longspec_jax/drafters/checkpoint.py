"""What files of drafts have in common: the names of a layer's tensors, and tables of their own."""

from dataclasses import dataclass
from typing import Any

from longspec_jax.drafters.tables import TableParams
from longspec_jax.weights.tables import MLP, QKV_BIAS_PARTS, QKV_KERNEL, Rule

LAYER_CONFIG = "transformer_layer_config"
"""Where files of speculators describe the layers."""
QKV = Rule("self_qkv/fused/kernel", "D K * H", QKV_KERNEL)
QKV_BIAS = Rule("self_qkv/fused/bias", "K * H", QKV_BIAS_PARTS)
SELF_OUT = Rule("self_out/kernel", "N H D", (("self_attn.o_proj.weight", "D (N H)"),))
_MLP_NORM = Rule("mlp_norm/scale", "D", (("post_attention_layernorm.weight", "D"),))
_QK_NORM = (
    Rule("q_norm/scale", "H", (("self_attn.q_norm.weight", "H"),)),
    Rule("k_norm/scale", "H", (("self_attn.k_norm.weight", "H"),)),
)
EMBEDDING = (Rule("embedding", "V D", (("embed_tokens.weight", "V D"),)),)
_HEAD = (Rule("head", "v D", (("lm_head.weight", "v D"),)),)


def llama_rules(config: Any) -> tuple[Rule, ...]:
    """Of a Llama's layer, by its switches: all but :data:`QKV` and the norms before it."""
    switched = (QKV_BIAS,) * config.qkv_bias + _QK_NORM * config.qk_norm
    return SELF_OUT, _MLP_NORM, *MLP, *switched


@dataclass(frozen=True)
class TableFormat:
    """How a draft is stored."""

    dialect: Any
    """Whose ``config.json`` it has."""
    embedding: bool
    """Whether its own embedding is stored."""
    head: bool
    """Whether its own LM head is stored."""

    @property
    def tables(self) -> tuple[Rule, ...]:
        """The rules of its own tables."""
        return EMBEDDING * self.embedding + _HEAD * self.head

    def stored(self, params: TableParams) -> dict[str, Any]:
        """The layers, and the tables that are stored; raises ValueError for those in 8 bits."""
        if params.int8:
            raise ValueError("the draft is in 8 bits; load it with int8=False to save it")
        tables = {"embedding": self.embedding, "head": self.head}
        return {**params.layer, **{name: getattr(params, name) for name in tables if tables[name]}}


def proposals(algorithm: str, tokens: int = 3) -> dict[str, Any]:
    """How speculators would decode with a draft; its loader asks for it."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "verifier": {"name_or_path": None, "architectures": []},
    }
