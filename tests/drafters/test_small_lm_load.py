"""Loading a small model for a target: what is taken, and every refusal."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.checkpoints.small_lm import load
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.small_lm import SmallLM, SmallLMDrafter, SmallLMOptions
from longspec_jax.sharding import make_mesh
from longspec_jax.weights.hf import save_target
from tests.kit import each_row, random_target, tiny_target_config
from tests.vicuna import save_sentences

TARGET = tiny_target_config()
CONFIG = tiny_target_config(num_layers=1, model_width=20)
TREE = TreeConfig((2,))


def load_small_lm(folder, target, options=None, *, tokenizer=None, mesh=None) -> SmallLM:
    return load(folder, Target(target, None, tokenizer), options or SmallLMOptions(), mesh=mesh)


def tokenizer(words: int = 90, special: str = "<end>", **changes: str) -> Tokenizer:
    """Words numbered from 0 on, one of them perhaps another, and a special token after them."""
    known = {changes.get(f"w{i}", f"w{i}"): i for i in range(words)}
    made = Tokenizer(models.WordLevel(known, unk_token="w0"))
    made.add_special_tokens([AddedToken(special)])
    return made


def of_transformers(made: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=made)


def small_model(folder: Path, made: Tokenizer | None = None, **overrides: Any) -> Path:
    """A random small model, its tokenizer next to it if it has one."""
    config = replace(CONFIG, **overrides)
    save_target(folder, config, random_target(config, seed=7))
    if made is not None:
        made.save(str(folder / "tokenizer.json"))
    return folder


def test_what_is_loaded_is_the_whole_small_model(tmp_path: Path) -> None:
    loaded = load_small_lm(small_model(tmp_path), TARGET)
    assert loaded.config == CONFIG and not loaded.narrower and loaded.own_params is loaded.params
    jax.tree.map(np.testing.assert_array_equal, loaded.params, random_target(CONFIG, seed=7))
    assert loaded.drafter(TREE, "xla") == SmallLMDrafter(CONFIG, TREE, "xla")


def test_it_computes_in_the_targets_dtype_unless_told(tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    half = replace(TARGET, dtype="bfloat16")
    for options, expected in (
        (SmallLMOptions(), "bfloat16"),
        (SmallLMOptions("float32"), "float32"),
    ):
        loaded = load_small_lm(folder, half, options)
        assert loaded.config.dtype == expected
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {expected}
    with pytest.raises(ValueError, match="dtype 'int8' is not supported"):
        load_small_lm(folder, half, SmallLMOptions("int8"))


def test_on_a_mesh_every_device_has_the_whole(tmp_path: Path) -> None:
    loaded = load_small_lm(small_model(tmp_path), TARGET, mesh=make_mesh(tp=2))
    for leaf in jax.tree.leaves(loaded.params):
        assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == 2


def test_a_vocabulary_with_other_padding_is_taken_if_the_tokenizer_is_the_same(
    tmp_path: Path,
) -> None:
    """Special tokens may be others: Llama 3 and 3.1 name theirs differently."""
    theirs = of_transformers(tokenizer(special="<stop>"))
    folder = small_model(tmp_path / "less", tokenizer(), vocab_size=97)
    less = load_small_lm(folder, TARGET, tokenizer=theirs)
    assert less.narrower and less.config.vocab_size == 97
    assert less.drafter(TREE).narrower

    wide = replace(CONFIG, vocab_size=128)
    folder = small_model(tmp_path / "more", tokenizer(), vocab_size=128)
    more = load_small_lm(folder, TARGET, tokenizer=theirs)
    assert not more.narrower and more.config == replace(wide, vocab_size=101)
    whole = random_target(wide, seed=7)
    for table in ("embedding", "head"):
        np.testing.assert_array_equal(more.params[table], whole[table][:101])
    assert jax.tree.structure(more.params) == jax.tree.structure(whole)


def test_tied_tables_are_cut_together(tmp_path: Path) -> None:
    made = tokenizer()
    folder = small_model(tmp_path, made, vocab_size=128, tied_embeddings=True)
    loaded = load_small_lm(folder, TARGET, tokenizer=of_transformers(made))
    assert "head" not in loaded.params and loaded.params["embedding"].shape == (101, 20)


@each_row(("size", "without"), [(97, "the small model"), (128, "the target")])
def test_sizes_that_no_tokenizer_explains_are_refused(
    tmp_path: Path, size: int, without: str
) -> None:
    ours = None if without == "the small model" else tokenizer()
    theirs = None if without == "the target" else of_transformers(tokenizer())
    folder = small_model(tmp_path, ours, vocab_size=size)
    with pytest.raises(ValueError) as refused:
        load_small_lm(folder, TARGET, tokenizer=theirs)
    error = str(refused.value)
    assert f"vocab_size={size}, the target 101, and {without} comes without" in error
    assert str(folder) in error and "tokenizer.json" in error


@each_row(
    ("size", "other", "difference"),
    [
        (
            101,
            tokenizer(w7="other"),
            "token 7 is 'w7' in the small model and 'other' in the target",
        ),
        (97, tokenizer(95), "token 90 is missing in the small model and 'w90' in the target"),
        (128, tokenizer(9), "token 9 is 'w9' in the small model and missing in the target"),
    ],
)
def test_another_tokenizer_is_refused_whatever_the_sizes(
    tmp_path: Path, size: int, other: Tokenizer, difference: str
) -> None:
    folder = small_model(tmp_path, tokenizer(), vocab_size=size)
    with pytest.raises(ValueError) as refused:
        load_small_lm(folder, TARGET, tokenizer=of_transformers(other))
    assert f"vocab_size={size}, the target 101, and their tokenizers differ" in str(refused.value)
    assert difference in str(refused.value)


def test_a_tokenizer_of_sentencepiece_alone_is_compared(tmp_path: Path) -> None:
    """Its pieces, whichever form the target's has."""
    folder = small_model(tmp_path, vocab_size=384)
    save_sentences(folder, 380)
    theirs = LlamaTokenizer.from_pretrained(folder)
    target = replace(CONFIG, vocab_size=384)
    load_small_lm(folder, target, tokenizer=theirs)
    save_sentences(folder, 379)
    with pytest.raises(ValueError, match=r"tokenizers differ: token \d+ is .* in the small"):
        load_small_lm(folder, target, tokenizer=theirs)
    (folder / "tokenizer.model").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"tokenizer.model: the tokenizer cannot be read .*again"):
        load_small_lm(folder, target)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: the tokenizer cannot be read .*again"):
        load_small_lm(folder, TARGET)


def test_too_short_a_range_is_refused_unless_no_text_is_longer(tmp_path: Path) -> None:
    folder = small_model(tmp_path, max_positions=512)
    with pytest.raises(ValueError) as refused:
        load_small_lm(folder, TARGET)
    error = str(refused.value)
    assert "made for 512 positions" in error and "up to 1024 tokens" in error
    assert "context=512" in error
    assert load_small_lm(folder, TARGET, SmallLMOptions(context=512)).config.max_positions == 512
    with pytest.raises(ValueError, match="up to 513 tokens"):
        load_small_lm(folder, TARGET, SmallLMOptions(context=513))
    with pytest.raises(ValueError, match="context=0 must be at least 1"):
        SmallLMOptions(context=0)


def test_it_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = small_model(tmp_path, vocab_size=97)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="vocab_size=97"):
        load_small_lm(folder, TARGET)


def test_an_unsupported_family_is_refused_as_a_target_is(tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["OPTForCausalLM"]}))
    with pytest.raises(ValueError, match="OPTForCausalLM"):
        load_small_lm(folder, TARGET)
