"""Every family equals transformers' models in float32: chunks, decoding and trees."""

import json
from contextlib import ExitStack
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Needs, Params
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.sharding import partition_spec
from longspec_jax.weights.checkpoint import open_tensors
from longspec_jax.weights.hf import load_target, save_target
from longspec_jax.weights.params import assemble
from longspec_jax.weights.tables import target_table
from tests.decoding.lossless import generate, request
from tests.kit import ancestors, random_draft, relative_error
from tests.models.families import CASES, load, torch, transformers
from train.drafts.kinds import LongSpecSettings
from train.drafts.longspec import Draws, LongSpecObjective
from train.step import Batch
from train.target import run_target

pytestmark = pytest.mark.full

MIXED = "ministral", "gemma2", "gemma3_text", "gemma4_text", "olmo3", "gpt_oss"
"""Types of models with windows in some layers."""
PROMPT, CHUNK = 44, 11
"""Longer than the range before a scaling, which is 16 or 32 tokens."""
TOLERANCE = 1e-4
"""Largest absolute error of a logit, the bar of the project."""
SETTINGS = LongSpecSettings("longspec", "", 11, False, 0, 1, distillation=0.5)
COVERED = {"phi3", "granite", "gemma4-unified"}
"""Of these only the files are tested: the arithmetic is that of other cases."""
UNTRAINED = COVERED | {"llama-linear", "llama3", "mistral", "qwen2-yarn", "qwen3.5-moe"}
"""Of these the pass of training is that of other cases."""
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 6)
DEPTHS = np.array([0, 1, 1, 2, 2, 2, 3, 3, 4])
MASK = ancestors(PARENTS)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, *load(request.param, folder)


def _oracle(model, tokens, positions, mask):
    """Logits of a pass without cache; ``mask[i, j]``: whether token i sees token j."""
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        # A recurrence has no mask: every node's path is a text of its own.
        with torch.no_grad():
            paths = [torch.from_numpy(tokens[row])[None] for row in mask]
            return np.stack([model(path).logits.numpy()[0, -1] for path in paths])

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


def _check_cached(model, config, cache, tokens):
    """The draft reads a layer's keys and values: rotated, as transformers caches them."""
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens), use_cache=True).past_key_values
    layer = config.layer(config.read_layer)
    # A window's are a ring, and channels are in another order where some are not rotated.
    if layer.window is None and config.rotary.block is None:
        theirs, end = theirs.layers[config.read_layer], tokens.shape[1]
        for ours, expected in (cache.keys, theirs.keys), (cache.values, theirs.values):
            assert relative_error(ours[config.read_layer][:, :, :end], expected.numpy()) < 1e-5


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
    _check_cached(model, config, cache, tokens[None, :PROMPT])
    nodes = (tokens[None, PROMPT:], positions[None, PROMPT:], MASK[None])
    found = verify(params, cache, *map(jnp.asarray, nodes), jnp.asarray([PROMPT]))
    np.testing.assert_allclose(found.logits[0], expected[PROMPT:], atol=TOLERANCE)


@pytest.mark.parametrize("pair", ["gemma4", "gemma4-e", "gemma4-moe"], indirect=True)
def test_greedy_text_is_that_of_transformers(pair):
    """Beyond the window, with trees of lookup."""
    _, model, config, params = pair
    tokens, new = np.random.default_rng(9).integers(3, 97, (1, 29)).astype(np.int32), 40
    with torch.no_grad():
        given = torch.from_numpy(tokens).long()
        whole = model.generate(given, max_new_tokens=new, do_sample=False).numpy()[0, 29:]
    drafter, asked = (
        NgramDrafter(TreeConfig((2, 1, 1))),
        request(seeds=(5,), stop=((-1,),), new=[new]),
    )
    given = Params(params, ()), tokens, np.array([29]), asked
    [text], _ = generate(TargetModel(config), drafter, *given)
    np.testing.assert_array_equal(text[: len(whole)], whole)
    assert len({*whole.tolist()}) > 5


@pytest.mark.parametrize("pair", [name for name in CASES if name not in UNTRAINED], indirect=True)
def test_training_reads_the_target_that_is_served(pair):
    """A step's frozen features are those of prefill, and its target's loss is Hugging Face's."""
    _, model, config, params = pair
    target, layers = TargetModel(config), tuple(range(-1, config.num_layers))
    tokens = np.random.default_rng(7).integers(3, 97, (1, PROMPT))
    positions = jnp.arange(PROMPT)[None]
    view = jax.jit(partial(run_target, config, mlp_chunk=16, keep=layers))(
        params, jnp.asarray(tokens), positions
    )
    cache, found = target.allocate(1, PROMPT), []
    needs = Needs(hidden=layers)
    prefill = jax.jit(partial(target.prefill_chunk, needs=needs))
    for start in range(0, PROMPT, CHUNK):
        chunk = jnp.asarray(tokens[:, start : start + CHUNK])
        at, last = jnp.asarray([start]), jnp.asarray([CHUNK - 1])
        output = prefill(params, cache, chunk, at, last)
        cache = output.cache
        found.append((output.hidden / config.logits_divisor, output.features.hidden))
    served = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *found)
    for layer in layers:
        assert relative_error(view.kept[layer], served[1][layer]) < 1e-5, layer
    assert relative_error(view.hidden, served[0]) < 1e-5
    with torch.no_grad():
        oracle = model(torch.from_numpy(tokens), output_hidden_states=True)
    for layer, expected in zip(layers[:-1], oracle.hidden_states, strict=False):
        assert relative_error(view.kept[layer], expected.numpy()) < 1e-5, layer
    if config.layer(config.read_layer).window is None:
        for ours, theirs in (view.keys, cache.keys), (view.values, cache.values):
            read = np.asarray(theirs[config.read_layer])[:, :, :PROMPT].swapaxes(1, 2)
            assert relative_error(ours, read) < 1e-5

        draft = DraftConfig.for_target(config, window=11)
        objective = LongSpecObjective(config, draft, SETTINGS, 0, 16, 16)
        batch = Batch(jnp.asarray(tokens), jnp.ones((1, PROMPT)))
        draws = Draws(positions, jnp.ones(1, jnp.int32))

        def loss_of(layer):
            sums = objective.sums(layer, params, batch, draws)
            return sums["loss"], sums["target_loss"]

        step = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
        (loss, theirs), gradient = step(random_draft(draft))
        assert np.isfinite(loss)
        assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))
        expected = torch.nn.functional.cross_entropy(
            oracle.logits[0, :-1], torch.from_numpy(tokens)[0, 1:], reduction="sum"
        )
        assert relative_error(theirs, expected) < 1e-4


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
    assert type(model_again) is type(model)
    tokens = np.random.default_rng(5).integers(3, 97, 40)
    with torch.no_grad():
        each = [m(torch.from_numpy(tokens)[None]).logits.numpy() for m in (model, model_again)]
    np.testing.assert_allclose(each[1], each[0], atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [2]
