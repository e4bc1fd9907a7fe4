"""The attention benchmark on a CPU: its rows, its refusals, its arithmetic."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import attention
from benchmarks.attention import (
    HEAD_MAJOR,
    TOKEN_MAJOR,
    Case,
    Operands,
    abstract_operands,
    tree_mask,
)
from benchmarks.timing import Roofline

FIELDS = {
    *("implementation", "tokens", "heads", "kv_heads", "head_dim", "context", "batch", "dtype"),
    *("microseconds", "tb_per_s", "tflop_per_s", "percent_of_roof"),
}
CASE = Case(tokens=7, heads=6, kv_heads=2, head_dim=16, context=256, batch=3, dtype="float32")

TORCH_CASE = Case(tokens=7, heads=6, kv_heads=2, head_dim=16, context=25, batch=3, dtype="float32")


def test_the_command_times_what_runs_and_notes_what_does_not(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rows.json"
    bench.main(
        [
            *("attention", "--tokens=3", "--heads=4/2", "--context=256", "--batch=1"),
            *("--dtype=float32", "--implementation=ours", "--implementation=mosaic"),
            *("--implementation=cudnn", "--implementation=flashinfer"),
            f"--json={file}",
        ]
    )
    written = json.loads(file.read_text())
    assert {"device", "versions", "commit", "date", "roof_tb_per_s"} <= set(written["header"])
    ours, *others = written["rows"]
    assert set(ours) == FIELDS and ours["microseconds"] > 0
    for row, name in zip(others, ("mosaic", "cudnn", "flashinfer"), strict=True):
        assert row["implementation"] == name and row["microseconds"] is None
    assert others[0]["refusal"].startswith("NotImplementedError: the Mosaic GPU kernel")
    assert others[0]["refusal"] in capsys.readouterr().out


def test_bytes_and_operations_by_hand() -> None:
    assert CASE.cache_bytes == 2 * 3 * 2 * 256 * 16 * 4
    assert CASE.bytes == CASE.cache_bytes + 3 * 7 * 16 * 4 * (2 * 6 + 2 * 2)
    assert CASE.operations == 2 * 2 * 3 * 6 * 7 * (256 + 7) * 16
    assert CASE.calls == CASE.copies * CASE.turns >= 8
    row = CASE.row("ours", Roofline(bytes_per_s=1e9, operations_per_s=1e12), 1e-3)
    assert row["percent_of_roof"] == pytest.approx(100 * CASE.bytes / 1e9 / 1e-3, abs=0.1)


@pytest.mark.parametrize("layout", [HEAD_MAJOR, TOKEN_MAJOR])
def test_programs_are_compiled_for_the_operands(layout: str) -> None:
    operands = Operands()
    q, caches, *rest = operands.of(CASE, layout)
    q_shape, cache_shapes, *rest_shapes = abstract_operands(CASE, layout)
    assert len(caches) == len(cache_shapes) == CASE.copies
    found = [q, *caches[0], *caches[-1], *rest]
    expected = [q_shape, *cache_shapes[0], *cache_shapes[-1], *rest_shapes]
    assert [(a.shape, a.dtype) for a in found] == [(b.shape, b.dtype) for b in expected]
    assert not np.array_equal(caches[0][0], caches[1][0])
    assert operands.of(CASE, layout)[1] is caches, "equal caches are drawn once"


class RaggedWrapper:
    """FlashInfer's interface as documented, row by row: the library itself asks for a GPU."""

    def __init__(self, workspace: Any, layout: str) -> None:
        import torch

        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        custom_mask: Any,
        q_data_type: Any,
    ) -> None:
        import torch

        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        self.queries, self.keys = qo_indptr.tolist(), kv_indptr.tolist()
        self.shapes = (num_qo_heads, head_dim_qk), (num_kv_heads, head_dim_qk)
        self.mask, self.dtype = custom_mask, q_data_type

    def run(self, q: Any, k: Any, v: Any) -> Any:
        import torch

        assert q.dtype == self.dtype and (*q.shape[1:],) == self.shapes[0]
        assert k.shape == v.shape and (*k.shape[1:],) == self.shapes[1]
        rows, seen = [], 0
        for row in range(len(self.queries) - 1):
            mine = slice(*self.queries[row : row + 2])
            its = slice(*self.keys[row : row + 2])
            size = (mine.stop - mine.start, its.stop - its.start)
            mask = self.mask[seen : seen + size[0] * size[1]].view(size)
            seen += mask.numel()
            parts = (part.transpose(0, 1) for part in (q[mine], k[its], v[its]))
            attend = torch.nn.functional.scaled_dot_product_attention
            rows.append(attend(*parts, attn_mask=mask, enable_gqa=True).transpose(0, 1))
        assert seen == len(self.mask)
        return torch.cat(rows)


def test_flashinfer_sees_prefix_and_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="FlashInfer takes its tensors")
    module: Any = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = RaggedWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    tree = torch.from_numpy(tree_mask(TORCH_CASE.tokens))
    q, caches = attention.flashinfer_operands(TORCH_CASE, "cpu")
    assert len(caches) == TORCH_CASE.copies and caches[0].shape == (2, 3, 25 + 7, 2, 16)
    out = attention.flashinfer_call(TORCH_CASE, tree)(q, *caches[1])
    assert out.shape == q.shape == (3, 7, 6, 16)
    mask = torch.cat([torch.ones(7, 25, dtype=torch.bool), tree], 1)
    head_major = (part.transpose(1, 2) for part in (q, *caches[1]))
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(*head_major, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out[0], out[1])


def test_one_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="FlashInfer takes its tensors")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        attention.flashinfer_call(TORCH_CASE, None)
