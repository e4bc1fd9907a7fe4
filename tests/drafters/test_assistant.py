"""Gemma 4's assistant: chains equal transformers', of files as they are published."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax import PLAIN, LongSpec
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Committed, Features, Params, View
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.registry import ASSISTANT
from longspec_jax.loading import choose_drafts
from longspec_jax.weights.hf import load_target
from tests.drafters.kit import Given, assert_partitioned, edit
from tests.kit import each_row
from tests.models.families import make_model

torch: Any = pytest.importorskip("torch", reason="the oracle is transformers' own")
transformers: Any = pytest.importorskip("transformers")
CLUSTERS, CHOSEN = 97, 23
"""The tiny vocabulary has a prime number of tokens: each is a cluster."""


def assistant_of(target: Any, centroids: bool) -> Any:
    """A random assistant of a random target."""
    raw = target.config.to_dict()
    kept = ("vocab_size", "num_attention_heads", "head_dim", "num_key_value_heads", "layer_types")
    kept += ("sliding_window", "rope_parameters", "attention_k_eq_v", "max_position_embeddings")
    full = next(iter(raw["per_layer_config"].values()))
    text = transformers.Gemma4TextConfig(
        **{key: raw[key] for key in kept},
        global_head_dim=full["head_dim"],
        num_global_key_value_heads=full.get("num_key_value_heads"),
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=len(raw["layer_types"]),
        num_kv_shared_layers=len(raw["layer_types"]),
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=raw["hidden_size"],
        use_ordered_embeddings=centroids,
        num_centroids=CLUSTERS,
        centroid_intermediate_top_k=CHOSEN,
    )
    torch.manual_seed(3)
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "layer_scalar" in name:
                parameter += 0.3 * torch.randn_like(parameter)
        if centroids:
            order = torch.randperm(raw["vocab_size"])
            model.masked_embedding.token_ordering.copy_(order)
    return model


def published(folder: Path, case: str, centroids: bool = False, **more: Any) -> tuple[Any, Any]:
    """A target and its assistant, in folders of these names, and transformers' models of them."""
    target = make_model(case, **more)
    assistant = assistant_of(target, centroids)
    target.save_pretrained(folder / "target")
    assistant.save_pretrained(folder / "assistant")
    return target, assistant


def loaded(folder: Path) -> tuple[Target, Any]:
    """Both of them here."""
    target = Target(*load_target(folder / "target", dtype="float32"))
    [chosen] = choose_drafts([folder / "assistant"], {})
    assert chosen.kind is ASSISTANT
    return target, chosen.load(target)


@pytest.mark.parametrize("case, centroids", [("gemma4", False), ("gemma4-e", True)])
def test_chains_equal_transformers(tmp_path: Path, case: str, centroids: bool) -> None:
    """Position, keys and values that are read, what is fed back; a window beyond the text."""
    theirs, assistant = published(tmp_path, case, centroids, sliding_window=64)
    target, draft = loaded(tmp_path)
    assert bool(draft.config.centroids) == centroids
    assert_partitioned(draft.params.layer)
    random = np.random.default_rng(7)
    text, following = (random.integers(0, 97, (1, n)).astype(np.int32) for n in (9, 4))
    with torch.no_grad():
        run = theirs(
            torch.from_numpy(text[:, :8]).long(),
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
    shared = run.shared_kv_states
    kinds = {True: "sliding_attention", False: "full_attention"}
    rows: list[list[Any]] = [[None] * target.config.num_layers for _ in range(2)]
    for layer, source in enumerate(draft.config.sources):
        kind = shared[kinds[draft.config.own.layer(layer).window is not None]]
        rows[0][source], rows[1][source] = (jnp.asarray(part.numpy()) for part in kind)
    cache = KVCache(*map(tuple, rows))
    eight, model = jnp.full(1, 8), TargetModel(target.config)
    pending, done = jnp.asarray(text[:, 8]), jnp.zeros(1, bool)
    view = View(model, target.params, cache, pending, eight, eight, done)
    params, noise = Params(target.params, draft.params), Given(jnp.asarray(following), [])
    drafter: Any = draft.drafter(TreeConfig((1, 1, 1, 1)))
    state = drafter.begin(params, 1, 16)
    hidden = jnp.asarray(run.hidden_states[-1].numpy())
    features = Features({target.config.num_layers: hidden})
    committed = Committed(jnp.asarray(text[:, :8]), jnp.zeros(1, int), eight, features)
    state = drafter.extend(params, state, committed)
    drafter.propose(params, state, view, noise)
    last, token = run.hidden_states[-1][:, -1:], text[:, 8]
    for step in range(4):
        embedded = theirs.get_input_embeddings()(torch.from_numpy(token[:, None]).long())
        with torch.no_grad():
            output = assistant(
                inputs_embeds=torch.cat([embedded, last], dim=-1),
                position_ids=torch.tensor([[8]]),
                shared_kv_states=shared,
            )
        expected, found = output.logits[:, 0].numpy(), np.asarray(noise.heard[step])
        scored = found > -1e8
        assert scored.sum() == (CHOSEN if centroids else 97)
        np.testing.assert_allclose(found[scored], expected[scored], atol=2e-5, rtol=2e-5)
        last, token = output.last_hidden_state, following[:, step]


@pytest.mark.parametrize(
    "case, beside, temperature",
    [
        pytest.param("gemma4", [], 0.0, marks=pytest.mark.full),
        ("gemma4-e", ["ngram"], 1.0),
    ],
)
def test_texts_are_those_of_plain_decoding(
    tmp_path: Path, case: str, beside: list[str], temperature: float
) -> None:
    """Of prompts longer than the target's window, alone and joined with lookup.

    A random draft guesses right where it guesses a third of all tokens.
    """
    published(tmp_path, case)
    folder = str(tmp_path / "assistant")
    spec = LongSpec.from_pretrained(tmp_path / "target", [folder, *beside], dtype="float32")
    prompts = [[*range(3, 30)], [5, 9, 5, 9, 5]]
    options: dict[str, Any] = {"temperature": temperature, "seed": 4, "eos_token_id": []}
    plain = spec.generate(prompts, max_new_tokens=24, tree=PLAIN, **options)
    found = spec.generate(prompts, max_new_tokens=24, tree="30,2@50", **options)
    assert found.sequences == plain.sequences
    assert found.stats.acceptance_length > 1


def _without(name: str) -> Any:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({key: one for key, one in load_file(file).items() if key != name}, file)

    return change


def _in_text(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        inner = json.loads((folder / "config.json").read_text())["text_config"]
        edit(folder, text_config=inner | changes)

    return change


@each_row(
    ("change", "message"),
    [
        (_without("pre_projection.weight"), "missing pre_projection.weight"),
        (_without("masked_embedding.token_ordering"), "must list each of the 97 tokens once"),
        (lambda folder: edit(folder, backbone_hidden_size=7), "was made for a target of hidden"),
        (lambda folder: edit(folder, num_centroids=96), r"centroids.weight is \(97, 24\), must be"),
        (_in_text(vocab_size=96), "was made for a target of vocab_size=96"),
        (_in_text(sliding_window=9), "differ in heads, rotation or window"),
        (_in_text(head_dim=6), "differ in heads, rotation or window"),
    ],
)
def test_what_does_not_belong_to_the_target_is_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    published(tmp_path, "gemma4", centroids=True)
    change(tmp_path / "assistant")
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path)
