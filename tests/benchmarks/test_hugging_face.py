"""The benchmark of transformers on a CPU: its rows, its tokens, its arithmetic."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="transformers' models are PyTorch's")

from benchmarks import __main__ as bench  # noqa: E402
from benchmarks import hugging_face as bench_transformers  # noqa: E402
from benchmarks.arguments import SHAPES  # noqa: E402

FIELDS = {
    *("implementation", "shape", "context", "batch", "ms_per_token", "tokens_per_second"),
    *("percent_of_roof", "step_bytes", "compiled", "cuda_graph_skips"),
}


def test_the_command_writes_header_and_rows(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.json"
    words = "transformers --shape=tiny --context=48,64 --new_tokens=2 --repetitions=1"
    assert bench.main([*words.split(), f"--json={file}"]) == 0
    written = json.loads(file.read_text())
    assert {"device", "versions", "commit", "date", "roof_tb_per_s"} <= set(written["header"])
    row, other = written["rows"]
    assert (row["implementation"], row["context"]) == ("transformers-static", 48)
    assert set(row) >= FIELDS and other["context"] == 64
    assert row["tokens_per_second"] == pytest.approx(1e3 / row["ms_per_token"], rel=1e-2)
    assert "  ms_per_token " in capsys.readouterr().out


def test_the_timed_step_decodes_as_without_a_cache() -> None:
    """What is timed is decoding: the cache holds the prompt, and positions count on."""
    from transformers import StaticCache

    model = bench_transformers.random_model(SHAPES["tiny"], "cpu")
    cache = StaticCache(config=model.config, max_cache_len=64)
    tokens = torch.zeros((2, 1), dtype=torch.long)
    torch.manual_seed(1)
    text = torch.cat([torch.randint(model.config.vocab_size, (2, 37)), tokens], 1)
    torch.manual_seed(1)
    with torch.no_grad():
        bench_transformers.prefill(model, cache, context=37, batch=2, chunk=16)
        assert int(cache.get_seq_length()) == 37
        step = bench_transformers.greedy_step(model, cache, compiled=False)
        for position in range(37, 45):
            tokens = step(tokens, torch.full((1, 1), position))
            assert torch.equal(tokens, model(text).logits[:, -1:].argmax(-1))
            text = torch.cat([text, tokens], 1)


def test_bytes_by_hand() -> None:
    """A Vicuna-7B step reads all weights but the embedding table, and the cache of all layers."""
    model = bench_transformers.random_model(SHAPES["vicuna7b"], "meta")
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    weights = 32 * layer + 4096 + 32000 * 4096
    cache = 3 * 1000 * 32 * 2 * 4096
    assert bench_transformers.step_bytes(model, 3, 1000) == 2 * (weights + cache)
