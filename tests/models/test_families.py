"""Families beyond Llama's equal transformers' models in float32: chunks, decoding and trees."""

import json
from contextlib import ExitStack
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from longspec_jax.decoding.target import TargetModel
from longspec_jax.sharding import partition_spec
from longspec_jax.weights.checkpoint import open_tensors
from longspec_jax.weights.hf import load_target, save_target
from longspec_jax.weights.params import assemble
from longspec_jax.weights.tables import target_table
from tests.models.families import CASES, load
from tests.models.hf_models import torch, transformers

MIXED = "ministral", "gemma2", "gemma3_text", "olmo3", "gpt_oss"
"""Types of models of which some layers have windows."""
PROMPT, CHUNK = 44, 11
"""Longer than the range before a scaling, which is 16 or 32 tokens."""
TOLERANCE = 1e-4
"""Largest absolute error of a logit, the bar of the project."""
COVERED = {"qwen2-yarn", "phi3", "granite"}
"""Of these only the files are tested: the arithmetic is that of other cases."""
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 6)
DEPTHS = np.array([0, 1, 1, 2, 2, 2, 3, 3, 4])
MASK = np.eye(len(PARENTS), dtype=bool)
for node, parent in enumerate(PARENTS[1:], 1):
    MASK[node] |= MASK[parent]


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, *load(request.param, folder)


def _oracle(model, tokens, positions, mask):
    """Logits of a pass without cache; ``mask[i, j]``: whether token i sees token j."""

    def added(mask):
        lowest = torch.finfo(torch.float32).min
        return torch.zeros(1, 1, *mask.shape).masked_fill(~torch.from_numpy(mask), lowest)

    # A window is measured by positions, along the path of every node.
    window = getattr(model.config, "sliding_window", None) or len(positions)
    near = added(mask & (positions[:, None] - positions < window))
    # Some classes take a mask for each type of layer.
    several = model.config.model_type in ("smollm3", *MIXED)
    additive = {"full_attention": added(mask), "sliding_attention": near} if several else near
    with torch.no_grad():
        return model(
            torch.from_numpy(tokens)[None],
            position_ids=torch.from_numpy(positions)[None],
            attention_mask=additive,
        ).logits.numpy()[0]


@pytest.mark.parametrize("pair", [name for name in CASES if name not in COVERED], indirect=True)
def test_logits_of_chunks_a_step_and_a_tree(pair):
    _, model, config, params = pair
    target = TargetModel(config)
    tokens = np.random.default_rng(3).integers(3, 97, PROMPT + len(PARENTS))
    positions = np.concatenate([np.arange(PROMPT), PROMPT + DEPTHS])
    seen = np.tri(len(tokens), dtype=bool)
    seen[PROMPT:, PROMPT:] = MASK
    expected = _oracle(model, tokens, positions, seen)
    assert np.abs(expected).max() > 0.5, "logits near zero would prove nothing"

    prefill, verify = jax.jit(target.prefill_chunk), jax.jit(partial(target.verify, levels=4))
    cache = target.allocate(1, 60)
    for start in range(0, PROMPT, CHUNK):
        chunk = jnp.asarray(tokens[None, start : start + CHUNK])
        at, last = jnp.asarray([start]), jnp.asarray([CHUNK - 1])
        logits, cache, *_ = prefill(params, cache, chunk, at, last)
        np.testing.assert_allclose(logits[0], expected[start + CHUNK - 1], atol=TOLERANCE)
    nodes = (tokens[None, PROMPT:], positions[None, PROMPT:], MASK[None])
    found = verify(params, cache, *map(jnp.asarray, nodes), jnp.asarray([PROMPT]))
    np.testing.assert_allclose(found.logits[0], expected[PROMPT:], atol=TOLERANCE)


def test_a_share_of_the_heads_is_that_part_of_the_whole(pair):
    """As every device of a mesh over heads reads it, out of fused and reordered tensors."""
    folder, _, config, params = pair
    flat = flatten_dict(params, sep="/")
    with ExitStack() as stack:
        tensors = open_tensors(folder, stack)
        for leaf in target_table(config).leaves:
            axes = partition_spec(leaf.path)
            ranges = [(0, size) for size in leaf.shape]
            for axis, over in enumerate(axes):
                if over == "tp":
                    size = leaf.shape[axis]
                    ranges[axis] = (size // 2, size)
            found = assemble(leaf, tuple(ranges), tensors, "float32")
            expected = flat[leaf.path][tuple(slice(*each) for each in ranges)]
            np.testing.assert_array_equal(found, expected)


def test_files_survive_a_round_trip(pair, tmp_path):
    """What is written is read as the same model, by us and by transformers."""
    folder, model, config, params = pair
    save_target(tmp_path, config, params, stop_tokens=(2,))
    again, reloaded = load_target(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, reloaded, params)
    with ExitStack() as stack:
        ours, theirs = open_tensors(tmp_path, stack), open_tensors(folder, stack)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            whole = tuple(slice(None) for _ in tensor.shape)
            np.testing.assert_array_equal(ours[name].read(whole), tensor.read(whole))
    model_again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    tokens = np.random.default_rng(5).integers(3, 97, 40)
    with torch.no_grad():
        each = [m(torch.from_numpy(tokens)[None]).logits.numpy() for m in (model, model_again)]
    np.testing.assert_allclose(each[1], each[0], atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [2]
