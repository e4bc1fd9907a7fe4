"""What tests of drafts share: random parameters, stored files, chains that go a given way."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from longspec_jax.decoding.rows import Request
from longspec_jax.drafters.base import Committed, Drafter, Features, Params, SamplingNoise, View
from longspec_jax.drafters.tables import TableParams
from longspec_jax.drafters.tree import Tree
from longspec_jax.sharding import partition_spec, path_name
from longspec_jax.weights.tables import Table
from tests.decoding.lossless import LOOKUP, TABLE
from tests.kit import view_of

T = TypeVar("T", bound=TableParams)


def random_tree(table: Table, dtype: str, seed: int = 3, width: float = 0.2) -> Any:
    """Random parameters of a name table; scales of norms are near 1."""
    random, drawn = np.random.default_rng(seed), {}
    for leaf in table.leaves:
        normal = random.normal(size=leaf.shape)
        values = 1 + 0.3 * normal if leaf.path.endswith("scale") else width * normal
        drawn[leaf.path] = jnp.asarray(values, dtype)
    return unflatten_dict(drawn, sep="/")


def without_tables(params: T) -> T:
    """A draft's parameters whose tables are not stored."""
    return replace(params, stores_embedding=False, stores_head=False)


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int = 6) -> dict[str, np.ndarray]:
    """Random tensors of stored names and shapes, float32; weights of norms are near 1."""
    random, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        normal = random.normal(size=shape)
        values = 1 + 0.3 * normal if name.endswith("norm.weight") else 0.2 * normal
        tensors[name] = values.astype(np.float32)
    return tensors


def llama_layer(config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """A draft's layer as published: names and shapes, and keys of ``config.json``."""
    width, mlp, head = config.model_width, config.mlp_width, config.head_width
    heads, groups = config.num_heads * head, config.num_kv_heads * head
    rows: dict[str, int] = {"q": heads, "k": groups, "v": groups}
    shapes: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{part}_proj.weight": (size, width) for part, size in rows.items()},
        **{f"self_attn.{part}_proj.bias": (rows[part],) for part in "qkv" * config.qkv_bias},
        **{f"self_attn.{part}_norm.weight": (head,) for part in "qk" * config.qk_norm},
        "self_attn.o_proj.weight": (width, heads),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (mlp, width),
        "mlp.up_proj.weight": (mlp, width),
        "mlp.down_proj.weight": (width, mlp),
    }
    keys = {
        "head_dim": head,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": mlp,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    return shapes, keys


def publish(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    raw: Mapping[str, Any],
    file: str = "model.safetensors",
) -> None:
    """Write a draft's tensors and ``config.json``; those of a model in the folder stay."""
    folder.mkdir(exist_ok=True)
    config, weights = folder / "config.json", folder / file
    keys = json.loads(config.read_text()) if config.exists() else {}
    others = load_file(weights) if weights.exists() else {}
    config.write_text(json.dumps({**keys, **raw}))
    save_file({**others, **tensors}, weights)


def assert_holds(params: Any, tensors: Mapping[str, np.ndarray]) -> None:
    """Parameters are the stored numbers, all of them and no others, in whatever layout."""
    ours, stored = (
        np.sort(np.concatenate([np.ravel(each) for each in parts]))
        for parts in (jax.tree.leaves(params), tensors.values())
    )
    np.testing.assert_array_equal(ours, stored)


def edit(folder: Path, **changes: Any) -> Path:
    """Change keys of a ``config.json``, or take them away by None; returns the folder."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return folder


def assert_same_tensors(one: Path, two: Path) -> None:
    """Two folders hold the same tensors."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def assert_same_files(one: Path, two: Path) -> None:
    """Two folders hold the same bytes."""
    for file in ("model.safetensors", "config.json"):
        assert (one / file).read_bytes() == (two / file).read_bytes()


def assert_partitioned(params: Any) -> None:
    """Every parameter has a rule of partition."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert len(partition_spec(path_name(path))) <= leaf.ndim


@dataclass(frozen=True)
class Given(SamplingNoise):
    """Sampling noise that makes a chain go through given tokens, and notes the logits."""

    following: Any
    """``[B, levels]``: what follows the root, among the draft's own ids."""
    heard: list[jax.Array]

    def scores(self, logits: jax.Array, depth: int) -> jax.Array:
        self.heard.append(logits[:, 0])
        return jax.nn.one_hot(self.following[:, depth], logits.shape[2])[:, None]

    def draw(self, logits: jax.Array, depths: jax.Array) -> jax.Array:
        raise NotImplementedError

    def among(self, tokens: jax.Array) -> "Given":
        return self

    def after(self, steps: jax.Array, levels: int) -> "Given":
        raise NotImplementedError


@dataclass(frozen=True)
class Listening(Given):
    """Sampling noise at temperature 0 that notes the logits."""

    def scores(self, logits: jax.Array, depth: int) -> jax.Array:
        self.heard.append(logits)
        return logits


@partial(jax.jit, static_argnums=0)
def extended(drafter: Any, params: Any, state: Any, block: Any) -> Any:
    """A draft's state after a block: tokens, start, count, and the target's hidden states."""
    tokens, start, count, *hidden = block
    if not hidden:
        return drafter.extend(params, state, Committed(tokens, start, count))
    features = Features(dict(zip(drafter.config.features, hidden, strict=True)))
    return drafter.extend(params, state, Committed(tokens, start, count, features))


@partial(jax.jit, static_argnums=0)
def proposed(
    drafter: Any, params: Params, block: Any, pending: Any, following: Any = None
) -> tuple[Any, list[jax.Array]]:
    """A tree after a text, and the logits at the nodes of every level."""
    rows, slots = block[0].shape
    state = extended(drafter, params, drafter.begin(params, rows, slots), block)
    none = jnp.zeros((rows, 1, 8, 8))
    noise = Listening(None, []) if following is None else Given(following, [])
    tree = drafter.propose(params, state, view_of(pending, block[2], none, none), noise)
    return tree, noise.heard


def proposed_from(
    drafter: Any, params: Params, state: Any, view: View
) -> tuple[Tree, list[jax.Array]]:
    """A drafter's tree, and the logits that it scored at the nodes of every level."""

    def propose(params: Params, state: Any) -> tuple[Tree, list[jax.Array]]:
        noise = Listening(None, [])
        return drafter.propose(params, state, view, noise), noise.heard

    return jax.jit(propose)(params, state)


def paths(tree: Any, row: int) -> dict[tuple[int, ...], int]:
    """Tokens below the root on the path to every node that a walk can come to, and the node."""
    tokens, parents = np.asarray(tree.tokens[row]), np.asarray(tree.parents[row])
    names: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tokens)):
        if int(parents[node]) in names:
            names[node] = (*names[int(parents[node])], int(tokens[node]))
    return {path: node for node, path in names.items()}


def histogram(drafter: Drafter, requests: Request, draft: Any = TABLE) -> np.ndarray:
    """Rounds by accepted tokens, on the lookup model."""
    _, state = LOOKUP.run(drafter, draft, requests)
    return np.asarray(state.record.histogram).sum(axis=0)


def is_perfect(found: np.ndarray) -> bool:
    """All but the last rounds of the three rows, which their budgets may cut, accept everything."""
    return bool(found[-1] >= found.sum() - 3)
