"""What files of drafts have in common: the names of a layer's tensors, and tables of their own.

Trainers of drafts over the target's features store a reduced vocabulary among the weights: ``d2t``
holds what to add to each of the draft's ids.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from longspec_jax.checks import is_whole
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.tables import NOT_WHOLE, Sizes, TableParams
from longspec_jax.drafters.vocabulary import check_vocabulary
from longspec_jax.drafters.window import Seen
from longspec_jax.weights.checkpoint import Tensor, Tensors
from longspec_jax.weights.json_files import JsonObject
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
OFFSETS, MEMBERS = "d2t", "t2d"
"""What to add to each of the draft's ids, and which of the target's tokens it knows."""
DROPPED = {
    r"verifier_(norm|lm_head)\.weight": "the target has its own",
    MEMBERS: "it follows from d2t, with which it is compared",
}
"""Tensors that no draft over the target's features needs."""
_PREFIX = "model."
"""Stands before all names in some files."""


def llama_rules(config: Any) -> tuple[Rule, ...]:
    """Of a Llama's layer, by its switches: all but :data:`QKV` and the norms before it."""
    switched = (QKV_BIAS,) * config.qkv_bias + _QK_NORM * config.qk_norm
    return SELF_OUT, _MLP_NORM, *MLP, *switched


def own_tables(*, embedding: bool, head: bool) -> tuple[Rule, ...]:
    """The rules of the tables that are stored with a draft."""
    return EMBEDDING * embedding + _HEAD * head


def counting(*, entering: bool) -> str:
    """What the numbers of hidden states count in a file."""
    return f"the hidden states that {'enter' if entering else 'leave'} the layers"


def features_of(
    raw: JsonObject, key: str, target_layers: int, trainer: str, *, entering: bool
) -> tuple[int, ...]:
    """The layers after which a file says that hidden states are taken; -1 is the embedding.

    Args:
      raw: what holds the key.
      key: of a list of numbers.
      target_layers: how many layers the target has.
      trainer: whose file it is, for the message.
      entering: whether it counts what enters the layers. Else what leaves them, where the embedding
        is -1.

    Raises:
      ValueError: if it is no list of such numbers.
    """
    ids, least = raw.values[key], entering - 1
    most = least + target_layers
    listed = isinstance(ids, list) and bool(ids)
    if not listed or not all(is_whole(each) and least <= each <= most for each in ids):
        raise raw.error(
            key,
            f"must be layers of the target, {least} to {most}: it has {target_layers} layers, and "
            f"{trainer} counts {counting(entering=entering)}",
            "load the draft that belongs to this target",
        )
    return tuple(each - entering for each in ids)


def stored_params(params: TableParams) -> dict[str, Any]:
    """The layers, and the tables that the file has.

    Raises:
      ValueError: for parameters in 8 bits.
    """
    if params.int8:
        raise ValueError("the draft is in 8 bits; load it with int8=False to save it")
    found = {**params.layer}
    if params.stores_embedding:
        found["embedding"] = params.embedding
    if params.stores_head:
        found["head"] = params.head
    return found


def warn_of_window(source: str | Path, seen: Seen, made_for: int, target: TargetConfig) -> None:
    """Say which tokens of a text a draft sees, where nobody named them.

    Args:
      source: its folder or hub id.
      seen: which.
      made_for: positions of the draft.
      target: what it drafts for.
    """
    warnings.warn(
        f"{source}: the draft was made for {made_for} positions and the target for "
        f"{target.max_positions}, so it sees the first {seen.sinks} and the last {seen.window} "
        "tokens of a text; the draft option window=N changes that",
        stacklevel=4,
    )


def vocabulary_of(tensors: Tensors, draft: Sizes) -> np.ndarray | None:
    """The target's tokens that the draft knows, taken out of its tensors; None for all of them.

    ``d2t`` holds offsets: the target's id is the draft's plus the offset at it.
    """
    offsets, members = tensors.pop(OFFSETS, None), tensors.get(MEMBERS)
    if offsets is None:
        if draft.proposable != draft.vocab_size:
            raise ValueError(
                f"the draft knows {draft.proposable} of {draft.vocab_size} tokens, and d2t, "
                f"which says which, is not among its tensors; {NOT_WHOLE}"
            )
        return None
    if offsets.shape != (draft.proposable,):
        raise ValueError(
            f"d2t {offsets.shape} must have draft_vocab_size={draft.proposable} numbers; use the "
            "config.json that was saved with the weights"
        )
    tokens = check_vocabulary(np.arange(draft.proposable) + _whole(offsets), draft.vocab_size)
    if members is not None:
        listed = np.flatnonzero(_whole(members))
        if members.shape != (draft.vocab_size,) or not np.array_equal(np.sort(tokens), listed):
            raise ValueError(
                f"d2t names {len(tokens)} tokens and t2d {members.shape} marks {len(listed)}, and "
                f"they must be the same ones of the target's {draft.vocab_size}; {NOT_WHOLE}"
            )
    same = len(tokens) == draft.vocab_size and bool((tokens == np.arange(len(tokens))).all())
    return None if same else tokens


def vocabulary_tensors(vocabulary: ArrayLike | None, vocab_size: int) -> dict[str, np.ndarray]:
    """The inverse of :func:`vocabulary_of`: ``d2t`` and ``t2d``; none for all tokens."""
    if vocabulary is None:
        return {}
    tokens = np.asarray(vocabulary, np.int64)
    offsets = tokens - np.arange(len(tokens))
    return {OFFSETS: offsets, MEMBERS: np.isin(np.arange(vocab_size), tokens)}


def _whole(tensor: Tensor) -> np.ndarray:
    """A small tensor of whole numbers."""
    if len(tensor.shape) != 1:
        raise ValueError(f"d2t and t2d must be lists, got {tensor.shape}; {NOT_WHOLE}")
    return tensor.read((slice(None),))


def without_prefix(tensors: Tensors) -> Tensors:
    """The tensors under their usual names, where all carry a prefix."""
    named: Mapping[str, Tensor] = tensors
    if not all(name.startswith(_PREFIX) for name in named if name not in (OFFSETS, MEMBERS)):
        return dict(named)
    return {name.removeprefix(_PREFIX): tensor for name, tensor in named.items()}
