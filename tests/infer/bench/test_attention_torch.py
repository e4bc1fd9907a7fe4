"""The alternatives that compute with torch tensors: all of one meaning."""

import sys
import types
from typing import Any

import pytest

from infer.bench import attention_torch
from infer.bench.arguments import TORCH_CANDIDATES
from infer.bench.attention_cases import TOKEN_MAJOR, Case, tree_mask
from infer.bench.attention_torch import TORCH

torch = pytest.importorskip("torch", reason="the alternatives are PyTorch's, or take its tensors")
CASE = Case(tokens=7, heads=6, kv_heads=2, head_dim=16, context=25, batch=3, dtype="float32")


class RaggedWrapper:
    """FlashInfer's interface as documented, row by row: the library itself asks for a GPU."""

    def __init__(self, workspace: Any, layout: str) -> None:
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
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        self.queries, self.keys = qo_indptr.tolist(), kv_indptr.tolist()
        self.shapes = (num_qo_heads, head_dim_qk), (num_kv_heads, head_dim_qk)
        self.mask, self.dtype = custom_mask, q_data_type

    def run(self, q: Any, k: Any, v: Any) -> Any:
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


def test_every_alternative_is_one_that_can_be_named() -> None:
    assert (*TORCH,) == TORCH_CANDIDATES


def test_flashinfer_sees_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = RaggedWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    tree = torch.from_numpy(tree_mask(CASE.tokens))
    theirs, whole = TORCH["flashinfer"], TORCH["torch-sdpa"]
    assert theirs.layout == TOKEN_MAJOR
    q, caches = attention_torch.operands(CASE, theirs.layout, "cpu")
    assert len(caches) == CASE.copies and caches[0].shape == (2, 3, 25 + 7, 2, 16)
    out = theirs.attend(CASE, tree)(q, *caches[1])
    assert out.shape == q.shape == (3, 7, 6, 16)
    head_major = (part.transpose(1, 2) for part in (q, *caches[1]))
    expected = whole.attend(CASE, tree)(*head_major).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out[0], out[1])


def test_one_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        TORCH["flashinfer"].attend(CASE, torch.from_numpy(tree_mask(CASE.tokens)))
