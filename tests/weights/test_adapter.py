"""LoRA adapters: merged as PEFT merges them, used whole, or refused by name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax import LongSpec
from longspec_jax.config.layers import ExpertsConfig, LayerConfig, Rotary
from longspec_jax.weights.hf import load_target, save_target
from tests.kit import each_row, random_target, tiny_target_config
from train.fingerprint import model_digest
from train.pipeline import _models

CONFIG = tiny_target_config(vocab_size=29, num_layers=2)
TIED = tiny_target_config(vocab_size=29, num_layers=2, tied_embeddings=True)
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
PREFIX = "base_model.model."
RANK = 3
Arrays = dict[str, np.ndarray]


def sparse(count: int = 5, **more: Any) -> Any:
    """A target of experts that its file has one by one."""
    kind = LayerConfig(Rotary(10000.0), experts=ExpertsConfig(count, 2, 7, **more))
    return tiny_target_config(
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        kinds=(kind,),
        pattern=(0, 0),
        num_layers=2,
    )


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pair(module: str, shape: tuple[int, ...], rank: int = RANK, seed: int = 0) -> Arrays:
    """A and B of a linear, by their stored names."""
    out, into = shape
    return {
        f"{PREFIX}{module}.lora_A.weight": drawn(seed, rank, into),
        f"{PREFIX}{module}.lora_B.weight": drawn(seed + 1, out, rank),
    }


class Case:
    """A target in a folder, and an adapter next to it."""

    def __init__(self, folder: Path, config: Any = CONFIG) -> None:
        self.target, self.adapter, self.merged = (folder / one for one in ("t", "a", "m"))
        self.config = config
        for place in (self.target, self.merged):
            save_target(place, config, random_target(config))
        self.tensors: Arrays = load_file(self.target / "model.safetensors")
        self.adapter.mkdir()

    def shape(self, module: str) -> tuple[int, ...]:
        return self.tensors[f"{module}.weight"].shape

    def write(self, tensors: Arrays, **config: Any) -> None:
        own = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
        save_file(
            {name: np.ascontiguousarray(one) for name, one in tensors.items()},
            self.adapter / "adapter_model.safetensors",
        )
        (self.adapter / "adapter_config.json").write_text(json.dumps({**own, **config}))

    def check(self, sums: Arrays, instead: Arrays | None = None) -> None:
        """Loading with the adapter is loading a file that holds the sums."""
        whole = {name: one + sums.get(name, np.float32(0)) for name, one in self.tensors.items()}
        assert {*sums} <= {*whole}
        save_file(whole | (instead or {}), self.merged / "model.safetensors")
        config, found = load_target(self.target, adapter=self.adapter)
        _, expected = load_target(self.merged)
        assert config == self.config
        plain = jax.tree.leaves(load_target(self.target)[1])
        changed = 0
        for one, other, before in zip(
            jax.tree.leaves(found), jax.tree.leaves(expected), plain, strict=True
        ):
            np.testing.assert_allclose(one, other, atol=2e-5)
            changed += not np.array_equal(one, before)
        assert changed == len({*sums, *(instead or {})}) or changed > 0


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def product(tensors: Arrays, module: str, scale: float) -> Arrays:
    a, b = (tensors[f"{PREFIX}{module}.lora_{one}.weight"] for one in "AB")
    return {f"{module}.weight": np.float32(scale) * (b @ a)}


@each_row(
    "options, scale",
    [
        ({}, 8 / RANK),
        ({"use_rslora": True}, 8 / math.sqrt(RANK)),
        ({"lora_alpha": 3, "use_dora": False, "bias": "none", "new_option": None}, 1.0),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 5, "q_proj": 7}}, 5 / RANK),
        ({"alpha_pattern": {"q_proj": 6, "mlp": 9}, "use_rslora": True}, 6 / math.sqrt(RANK)),
        ({"rank_pattern": {r"layers\.[0-9]+\..*proj": RANK}, "r": 64}, 8 / RANK),
    ],
)
def test_the_scale_is_that_of_the_first_pattern(tmp_path, options, scale) -> None:
    case = Case(tmp_path)
    tensors = pair(Q, case.shape(Q))
    case.write(tensors, **options)
    case.check(product(tensors, Q, scale))


def test_patterns_may_name_modules_of_the_model_around(tmp_path: Path) -> None:
    case, own = Case(tmp_path), Q.removeprefix("model.")
    tensors = pair(Q, case.shape(Q))
    around = {
        name.replace("model.layers", "model.language_model.layers"): one
        for name, one in tensors.items()
    }
    case.write(around, alpha_pattern={f"model.language_model.{own}": 5})
    case.check(product(tensors, Q, 5 / RANK))


def test_several_modules_and_both_prefixes(case: Case) -> None:
    tensors = pair(Q, case.shape(Q)) | pair(DOWN, case.shape(DOWN), seed=5)
    sums = product(tensors, Q, 8 / RANK) | product(tensors, DOWN, 8 / RANK)
    case.write(tensors)
    case.check(sums)
    for prefix in ("model.language_model.", "language_model.model."):
        inside = {
            name.replace("model.layers", f"{prefix}layers"): one for name, one in tensors.items()
        }
        case.write(inside)
        case.check(sums)


def test_embeddings_and_modules_that_were_saved_whole(case: Case) -> None:
    embed, vocab = "model.embed_tokens", CONFIG.vocab_size
    low = {
        f"{PREFIX}{embed}.lora_embedding_A": drawn(1, RANK, vocab),
        f"{PREFIX}{embed}.lora_embedding_B": drawn(2, CONFIG.model_width, RANK),
        f"{PREFIX}{embed}.base_layer.weight": case.tensors[f"{embed}.weight"],
    }
    saved = {
        "lm_head.weight": drawn(3, *case.shape("lm_head")),
        "model.layers.0.input_layernorm.weight": drawn(4, CONFIG.model_width),
    }
    case.write(
        low | {PREFIX + name: one for name, one in saved.items()},
        modules_to_save=["lm_head", "norm"],
    )
    a, b = low[f"{PREFIX}{embed}.lora_embedding_A"], low[f"{PREFIX}{embed}.lora_embedding_B"]
    case.check({f"{embed}.weight": np.float32(8 / RANK) * (b @ a).T}, saved)


def of_experts(
    module: str, count: int, shape: tuple[int, int], seed: int
) -> tuple[Arrays, np.ndarray]:
    """A and B of all experts at once, and the sum of each by the formula."""
    out, into = shape
    a, b = drawn(seed, count * RANK, into), drawn(seed + 1, out, RANK * count)
    names = {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    each = [
        sum(np.outer(b[:, rank * count + expert], a[expert * RANK + rank]) for rank in range(RANK))
        for expert in range(count)
    ]
    return names, np.float32(8 / RANK) * np.stack(each)


@each_row("swapped", [False, True])
def test_experts_that_are_adapted_at_once(tmp_path: Path, swapped: bool) -> None:
    """Gate and up inside, down outside; before 0.18 PEFT exchanged what goes in and out."""
    config = sparse()
    case, module = Case(tmp_path, config), "model.layers.1.mlp.experts"
    width, hidden = 7, config.model_width
    turn = (lambda shape: shape[::-1]) if swapped else (lambda shape: shape)
    gate_up, up_sum = of_experts(f"{module}.base_layer", 5, turn((2 * width, hidden)), 1)
    down, down_sum = of_experts(module, 5, turn((hidden, width)), 3)
    if swapped:
        up_sum, down_sum = up_sum.swapaxes(1, 2), down_sum.swapaxes(1, 2)
    names = [f"{module}.{name}" for name in ("gate_up_proj", "down_proj")]
    case.write(gate_up | down, target_parameters=names)
    sums = {}
    for expert in range(5):
        sums[f"{module}.{expert}.gate_proj.weight"] = up_sum[expert, :width]
        sums[f"{module}.{expert}.up_proj.weight"] = up_sum[expert, width:]
        sums[f"{module}.{expert}.down_proj.weight"] = down_sum[expert]
    case.check(sums)
    case.write(gate_up | down, target_parameters=names, r=RANK + 1)
    with pytest.raises(ValueError, match=f"has the rank {RANK} and the file says {RANK + 1}"):
        load_target(case.target, adapter=case.adapter)
    # Alone it has the module's own name.
    alone, alone_sum = of_experts(module, 5, turn((hidden, width)), 7)
    alone_sum = alone_sum.swapaxes(1, 2) if swapped else alone_sum
    case.write(alone, target_parameters=["mlp.experts.down_proj"])
    case.check({f"{module}.{e}.down_proj.weight": alone_sum[e] for e in range(5)})
    one = f"{module}.2.gate_proj"
    older = pair(one, case.shape(one))
    case.write(older)
    case.check(product(older, one, 8 / RANK))


def test_sums_are_rounded_once(tmp_path: Path) -> None:
    """In 16 bits a sum is that of float32, rounded."""
    case = Case(tmp_path, tiny_target_config(vocab_size=29, num_layers=2, dtype="bfloat16"))
    tensors = pair(Q, case.shape(Q))
    case.write(tensors)
    _, found = load_target(case.target, adapter=case.adapter)
    [added] = product(tensors, Q, 8 / RANK).values()
    stored = case.tensors[f"{Q}.weight"]
    whole = case.tensors | {f"{Q}.weight": (stored.astype(np.float32) + added).astype(stored.dtype)}
    save_file(whole, case.merged / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, found, load_target(case.merged)[1])


def without_b(tensors: Arrays) -> Arrays:
    return {name: one for name, one in tensors.items() if "lora_B" not in name}


def renamed(**names: str) -> Callable[[Arrays], Arrays]:
    def work(tensors: Arrays) -> Arrays:
        [(old, new)] = names.items()
        return {name.replace(old, new): one for name, one in tensors.items()}

    return work


def also(name: str, *shape: int) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {**tensors, f"{PREFIX}{name}": drawn(9, *shape)}


def same(tensors: Arrays) -> Arrays:
    return tensors


@each_row(
    "change, options, words",
    [
        (same, {"peft_type": "LOHA"}, "peft_type='LOHA' is not supported, only LORA is"),
        (same, {"use_dora": True}, "use_dora=True cannot be merged: DoRA"),
        (same, {"bias": "all"}, "bias='all' cannot be merged"),
        (same, {"lora_bias": True}, "lora_bias=True cannot be merged"),
        (same, {"fan_in_fan_out": True}, "fan_in_fan_out=True cannot be merged"),
        (same, {"layer_replication": [[0, 1]]}, "layer_replication="),
        (same, {"alora_invocation_tokens": [1]}, "alora_invocation_tokens="),
        (same, {"trainable_token_indices": [1]}, "trainable_token_indices="),
        (
            same,
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights='pissa_niter_4' has chan",
        ),
        (same, {"kasa_config": {"a": 1}}, "kasa_config={'a': 1} is an option of PEFT that is not"),
        (same, {"r": 4}, "q_proj has the rank 3 and the file says 4"),
        (same, {"alpha_pattern": {"(": 1}}, "alpha_pattern={'(': 1} has the key '('"),
        (same, {"alpha_pattern": {r"(q\\)+_proj": 1}}, "a match may take for ever"),
        (same, {"rank_pattern": {"(?x) (q) +_proj": 1}}, "no group may repeat"),
        (same, {"lora_alpha": -1}, "lora_alpha"),
        (without_b, {}, "lora_A.weight is there without its lora_B"),
        (renamed(q_proj="q_porj"), {}, "2 of 2 tensors belong to nothing of the target, the first"),
        (
            renamed(q_proj="q_porj"),
            {},
            "the nearest of the target's is model.layers.1.self_attn.q_",
        ),
        (renamed(base_model="basemodel"), {}, "does not begin with base_model.model."),
        (also(f"{Q}.lora_magnitude_vector", 4), {}, "lora_magnitude_vector is of DoRA"),
        (also(f"{Q}.lora_B.bias", 4), {}, "lora_B.bias is a bias of the adapter"),
        (also("model.norm.weight", 8), {}, "1 of 3 tensors belong to nothing"),
        (also("lm_head.weight", 31, 8), {"modules_to_save": ["lm_head"]}, "has the shape (31, 8)"),
        (also(f"{DOWN}.lora_A.weight", 0), {}, "is there without its lora_B"),
        (
            lambda tensors: {name: one.ravel() for name, one in tensors.items()},
            {},
            "must have two axes; it was saved from shards that were not gathered",
        ),
        (
            lambda tensors: {name: one[:, :-1] for name, one in tensors.items()},
            {"r": 3},
            "the adapter is of another target",
        ),
        (lambda tensors: {name: one * np.inf for name, one in tensors.items()}, {}, "not finite"),
        (lambda tensors: {}, {}, "an adapter without tensors"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(tmp_path, change, options, words) -> None:
    case = Case(tmp_path)
    case.write(change(pair(Q, case.shape(Q))), **options)
    with pytest.raises(ValueError) as caught:
        load_target(case.target, adapter=case.adapter)
    assert words in str(caught.value), caught.value


def test_tied_tables_quantised_targets_and_missing_files_are_refused(tmp_path: Path) -> None:
    case = Case(tmp_path, TIED)
    embed = "model.embed_tokens"
    case.write({f"{PREFIX}{embed}.weight": drawn(1, *case.shape(embed))}, modules_to_save=[embed])
    with pytest.raises(ValueError, match="whose LM head is its embeddings"):
        load_target(case.target, adapter=case.adapter)
    config = case.target / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="an adapter is merged into 16-bit or 32-bit weights"):
        load_target(case.target, adapter=case.adapter)
    config.write_text(json.dumps(raw))
    with pytest.raises(FileNotFoundError, match="adapter_config.json"):
        load_target(case.target, adapter=tmp_path / "none")
    with pytest.raises(ValueError, match="adapter=5 must be the folder of a LoRA adapter"):
        LongSpec.from_pretrained(case.target, adapter=5)  # pyright: ignore[reportArgumentType]


def test_square_matrices_of_experts_are_refused(tmp_path: Path) -> None:
    config = sparse()
    case, module = Case(tmp_path, config), "model.layers.0.mlp.experts"
    hidden = config.model_width
    tensors, _ = of_experts(module, 5, (hidden, hidden), 1)
    case.write(tensors, target_parameters=["experts.down_proj"])
    with pytest.raises(ValueError, match="the adapter is of another target"):
        load_target(case.target, adapter=case.adapter)
    case.write(tensors, target_parameters=["experts.down_proj", "experts.gate_up_proj"])
    with pytest.raises(ValueError, match="must name one of gate_up_proj and down_proj"):
        load_target(case.target, adapter=case.adapter)


def test_an_adapter_counts_as_the_target_does(case: Case) -> None:
    """A resumed run knows a changed adapter, and a run without one is what it was."""

    def identity(adapter: str) -> str:
        draft = SimpleNamespace(init="")
        config = SimpleNamespace(revision="", adapter=adapter, draft=draft)
        run: Any = SimpleNamespace(target_source=str(case.target), config=config)
        return _models(run)["the target"]

    digests = {identity("")}
    assert digests == {model_digest(case.target)}
    for alpha in (8, 9, 8):
        case.write(pair(Q, case.shape(Q)), lora_alpha=alpha)
        digests.add(identity(str(case.adapter)))
    case.write(pair(Q, case.shape(Q), seed=7))
    assert len(digests | {identity(str(case.adapter))}) == 4


def test_models_are_loaded_with_an_adapter(case: Case) -> None:
    case.write(pair(Q, case.shape(Q)))
    spec = LongSpec.from_pretrained(case.target, "ngram", adapter=case.adapter)
    _, expected = load_target(case.target, adapter=str(case.adapter))
    jax.tree.map(np.testing.assert_array_equal, spec.target_params, expected)


PEFT_CASES: dict[str, dict[str, Any]] = {
    "linears": {"target_modules": "all-linear", "r": 4, "lora_alpha": 12},
    "rslora and patterns": {
        "target_modules": ["q_proj", "v_proj", "gate_proj"],
        "use_rslora": True,
        "rank_pattern": {"layers.0.self_attn.q_proj": 5},
        "alpha_pattern": {"v_proj": 3},
    },
    "tables": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "experts' last": {
        "target_modules": [],
        "target_parameters": ["mlp.experts.down_proj"],
        "r": 2,
    },
}


@pytest.mark.parametrize("name", PEFT_CASES)
def test_a_merge_is_that_of_peft(tmp_path: Path, name: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT, the format's own library, is not installed")
    import torch
    from transformers import AutoModelForCausalLM

    case = Case(tmp_path, sparse() if "experts" in name else CONFIG)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(case.target, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**PEFT_CASES[name]))
    with torch.no_grad():
        for each, values in adapted.named_parameters():
            if "lora_" in each or "modules_to_save" in each:
                values.copy_(torch.randn_like(values) * 0.1)
    adapted.save_pretrained(case.adapter, save_embedding_layers=name == "tables")
    adapted.merge_and_unload().save_pretrained(case.merged)
    _, found = load_target(case.target, adapter=case.adapter, dtype="float32")
    _, expected = load_target(case.merged, dtype="float32")
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), found, expected
    )
    different = jax.tree.map(np.array_equal, found, load_target(case.target, dtype="float32")[1])
    assert not all(jax.tree.leaves(different))
