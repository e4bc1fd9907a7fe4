"""Gemma 4's assistants as they are published, and the draft bound to its target."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.assistant import (
    AssistantConfig,
    AssistantDraft,
    AssistantOptions,
    AssistantParams,
    sources_of,
)
from longspec_jax.drafters.draft import Target
from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.families import FAMILIES
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.tables import (
    KEYS,
    ROTARY,
    TIED_HEAD,
    Rule,
    Table,
    bind,
    layer_rules,
    layer_sizes,
)

_AROUND = (
    Rule("fuse/kernel", "C D", (("pre_projection.weight", "D C"),)),
    Rule("feedback/kernel", "D T", (("post_projection.weight", "T D"),)),
    Rule("norm/scale", "D", (("model.norm.weight", "D"),)),
    Rule("head", "V D", (("model.embed_tokens.weight", "V D"),)),
)
_CENTROIDS = "masked_embedding.centroids.weight"
_ORDER = "masked_embedding.token_ordering"
_OF_CENTROIDS = (Rule("centroids/kernel", "D S", ((_CENTROIDS, "S D"),)),)
_READ_APART = {
    rf"model\.layers\.\d+\.{KEYS}": "its layers read the target's keys",
    _ORDER.replace(".", r"\."): "the clusters, which are not parameters",
}


def load(
    source: str | Path,
    target: Target,
    options: AssistantOptions = AssistantOptions(),  # noqa: B008 - frozen.
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> AssistantDraft:
    """Load an assistant.

    Raises:
      FileNotFoundError: if the draft or one of its files is missing.
      ValueError: if it does not belong to the target, or a file is damaged.
    """
    with open_folder(source, mesh, revision) as folder:
        tensors = folder.tensors
        with folder.raw.named():
            config = _config(folder.raw, tensors, target.config)
            config.check_fits(target.config)
        layer = folder.params(draft_table(config), tensors, config.own.dtype)
        clusters = None
        if config.centroids:
            clusters = jnp.asarray(_clusters(folder.raw, tensors, config))
    params = AssistantParams(
        head=layer.pop("head"),
        layer=layer,
        embedding=target.params["embedding"],
        clusters=clusters,
        embedding_factor=target.config.embedding_factor,
    )
    return AssistantDraft(config, params)


def draft_table(config: AssistantConfig) -> Table:
    """The tensors of an assistant."""
    own, width = config.own, config.target_width
    sizes = layer_sizes(own) | {"V": own.vocab_size, "C": 2 * width, "T": width}
    sizes |= {"S": config.centroids}
    rules = _AROUND + _OF_CENTROIDS * bool(config.centroids)
    leaves = [bind(rule, sizes) for rule in rules]
    names = FAMILIES[own.architecture].names
    for index, kind in enumerate(config.kinds):
        ours, theirs = f"layers_{index}/", f"model.layers.{index}."
        of_kind = sizes | layer_sizes(own, kind)
        leaves += [bind(rule, of_kind, ours, theirs) for rule in layer_rules(own, names, kind)]
    return Table(tuple(leaves), ROTARY | TIED_HEAD | _READ_APART)


def _config(raw: JsonObject, tensors: Tensors, target: TargetConfig) -> AssistantConfig:
    """The assistant that a ``config.json`` describes; that it has centroids its tensors say."""
    inner = raw.part("text_config")
    given = {
        "architectures": ["Gemma4ForCausalLM"],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": inner.values.get("vocab_size"),
    }
    own = target_config(JsonObject({**inner.values, **given}, inner.origin), target.dtype)
    if own.is_sparse or own.layer_inputs is not None:
        raise ValueError("an assistant with experts, or with inputs of each layer, is not computed")
    config = AssistantConfig(
        own=replace(own, max_positions=target.max_positions),
        target_width=raw.whole("backbone_hidden_size"),
        target_layers=target.num_layers,
        sources=sources_of(own, target),
    )
    if _CENTROIDS not in tensors:
        return config
    count = raw.whole("num_centroids", 2048)
    chosen = raw.whole("centroid_intermediate_top_k", 32, 1, count)
    return replace(config, centroids=count, chosen=chosen)


def _clusters(raw: JsonObject, tensors: Tensors, config: AssistantConfig) -> np.ndarray:
    """``[V]`` the cluster of each token; raises ValueError unless each token is in one."""
    stored = tensors.get(_ORDER)
    order = np.zeros(0, int) if stored is None else stored.read((slice(None),))
    tokens, count = np.arange(config.own.vocab_size), config.centroids
    if not np.array_equal(np.sort(order), tokens) or len(tokens) % count:
        raise ValueError(
            f"{raw.origin}: {_ORDER} must list each of the {len(tokens)} tokens once, in "
            f"{count} clusters of one size; download the file again"
        )
    found = np.zeros(len(tokens), np.int32)
    found[order] = np.arange(len(tokens)) // (len(tokens) // count)
    return found
