"""The benchmark of transformers on a CPU: both caches, the same tokens, its arithmetic."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="transformers' models are PyTorch's")

from infer.bench import __main__ as bench  # noqa: E402
from infer.bench import hugging_face as bench_transformers  # noqa: E402
from infer.bench.arguments import SHAPES  # noqa: E402

FIELDS = {
    *("implementation", "shape", "context", "batch", "ms_per_token", "tokens_per_second"),
    *("percent_of_roof", "prefill_seconds", "warm_up_seconds", "step_bytes"),
    *("compiled", "graphs", "cuda_graph_skips"),
}


def test_the_command_writes_header_and_rows(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails is a row with the reason."""
    empty_cache, asked = bench_transformers.empty_cache, iter([None, None, "magic"])
    monkeypatch.setattr(
        bench_transformers,
        "empty_cache",
        lambda implementation, *rest: empty_cache(next(asked) or implementation, *rest),
    )
    file = tmp_path / "rows.json"
    bench.main(
        [
            *("transformers", "--shape=tiny", "--context=48", "--new_tokens=2"),
            *("--repetitions=1", f"--json={file}", "--implementation=transformers-static"),
            *("--implementation=transformers-dynamic", "--implementation=transformers-dynamic"),
        ]
    )
    written = json.loads(file.read_text())
    assert {"device", "versions", "commit", "date", "roof_tb_per_s"} <= set(written["header"])
    *rows, magic = written["rows"]
    assert [row["implementation"] for row in rows] == [
        "transformers-static",
        "transformers-dynamic",
    ]
    for row in rows:
        assert set(row) >= FIELDS and row["graphs"] == 0
        assert row["tokens_per_second"] == pytest.approx(1e3 / row["ms_per_token"], rel=1e-2)
    assert magic["ms_per_token"] is None and "no implementation 'magic'" in magic["refusal"]
    assert "ms per token" in capsys.readouterr().out


def test_both_caches_decode_the_same_tokens() -> None:
    """What is timed is decoding: the cache holds the prompt, and positions count on."""
    model = bench_transformers.random_model(SHAPES["tiny"], "cpu")
    texts = []
    for implementation in (bench_transformers.STATIC, bench_transformers.DYNAMIC):
        cache = bench_transformers.empty_cache(implementation, model.config, 64)
        torch.manual_seed(1)
        with torch.no_grad():
            bench_transformers.prefill(model, cache, context=37, batch=2, chunk=16)
            assert int(cache.get_seq_length()) == 37
            step = bench_transformers.greedy_step(model, cache, compiled=False)
            tokens, text = torch.zeros((2, 1), dtype=torch.long), []
            for position in range(37, 45):
                tokens = step(tokens, torch.full((1, 1), position))
                text.append(tokens)
        texts.append(torch.cat(text, 1))
    assert torch.equal(*texts)


def test_bytes_by_hand() -> None:
    """A Vicuna-7B step reads all weights but the embedding table, and the cache of all layers."""
    model = bench_transformers.random_model(SHAPES["vicuna7b"], "meta")
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    weights = 32 * layer + 4096 + 32000 * 4096
    cache = 3 * 1000 * 32 * 2 * 4096
    assert bench_transformers.step_bytes(model, 3, 1000) == 2 * (weights + cache)
