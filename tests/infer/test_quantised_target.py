"""A target that was quantised here: a draft is trained for it, and changes none of its tokens."""

from pathlib import Path

import datasets
import pytest

from contrib import quantise
from longspec_jax import LongSpec
from longspec_jax.ops.matmul.quantised_weights import quantised_matrices
from tests.serve.kit import GeneratingEngine, model_of, serving
from tests.train.tiny import arguments, command, records, save_tiny_target, write_documents

pytestmark = pytest.mark.full


def test_a_draft_for_a_quantised_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained next to its frozen weights on two devices; it changes no token, and is served."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    whole, target = (
        save_tiny_target(tmp_path / "whole", model_width=64, mlp_width=96),
        tmp_path / "q",
    )
    assert quantise.main([str(whole), "--format=w4a16", f"--out={target}"]) == 0
    files, workdir = write_documents(tmp_path / "documents.jsonl", 18), tmp_path / "run"
    assert command(*arguments(target, files, workdir)) == 0
    assert sum("loss" in record for record in records(workdir)) == 2

    prompt = "the draft proposes a tree of"
    spec = LongSpec.from_pretrained(target, workdir / "draft", dtype="float32", prefill_chunk=32)
    assert len(quantised_matrices(spec.target_params)) == 4
    tokens = spec.tokenizer(prompt)["input_ids"]
    comparison = spec.compare([tokens], max_new_tokens=8, tree="2,2")
    assert comparison.identical
    [expected] = comparison.plain.text
    with serving(GeneratingEngine(spec), model_of(spec)) as client:
        _, answer = client.post("/v1/completions", prompt=tokens, max_tokens=8, temperature=0)
    assert answer["choices"][0]["text"] == expected
