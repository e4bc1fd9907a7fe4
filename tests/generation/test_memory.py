"""What a call that does not fit is told: only what can be done."""

from dataclasses import replace

import pytest

from infer.results import memory_plan_line
from longspec_jax.decoding.target import TargetModel
from longspec_jax.generation import memory
from longspec_jax.generation.memory import MemoryPlan, check_fits
from longspec_jax.ops.attention.path_ampere import splits_of
from tests.kit import each_row, tiny_target_config

CONFIG = tiny_target_config()
GB = 10**9


@pytest.fixture
def refusal(monkeypatch):
    def words(plan: MemoryPlan, free: int) -> str:
        monkeypatch.setattr(memory, "free_bytes", lambda mesh: free)
        with pytest.raises(MemoryError) as caught:
            check_fits(plan)
        return str(caught.value)

    return words


def test_sizes_are_decimal(refusal) -> None:
    words = refusal(MemoryPlan(2, 4096, 0, 0, 6 * GB, 75_500_000, GB), 4 * GB)
    assert "need 7.08 GB (6.00 GB cache, 75.5 MB draft state, about 1.00 GB working" in words
    assert "4.00 GB are free" in words and "GiB" not in words


def test_what_fits_is_named(refusal) -> None:
    words = refusal(MemoryPlan(4, 4096, 0, 0, 8 * GB, 0, 0), 4 * GB)
    assert "tokens per row, prompt and new tokens together" in words
    assert "decode fewer rows at once (max_num_seqs=1), or spread" in words


def test_rings_do_not_grow_with_the_context(refusal) -> None:
    """Half of the cache is what windows hold: the other half decides which context fits."""
    plan = MemoryPlan(1, 4096, 0, 0, 8 * GB, 0, 0, ring_bytes=4 * GB, saved_bytes=9 * GB)
    assert "largest context that fits is 2048 tokens" in refusal(plan, 6 * GB + 4096)
    assert "4096 slots (9.00 GB less by layers of windows or states), draft" in memory_plan_line(
        plan
    )


@each_row(("rows", "fewer"), [(1, False), (2, True)])
def test_no_context_of_0_tokens_is_advised(refusal, rows: int, fewer: bool) -> None:
    words = refusal(MemoryPlan(rows, 4096, 0, 0, GB, GB, 6 * GB), GB)
    assert "No context fits next to the draft state and the working memory" in words
    assert "pass a smaller prefill_chunk or tree" in words and "0 tokens" not in words
    assert "shorten" not in words and ("use fewer rows" in words) is fewer


def test_a_cache_that_the_host_cannot_hold_is_refused(monkeypatch) -> None:
    plan, frees = MemoryPlan(2, 4096, 0, 0, GB, 0, 0, host_cache_bytes=8 * GB), [4 * GB, 8 * GB]
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: None)
    monkeypatch.setattr(memory, "free_pinned_bytes", lambda: frees.pop())
    check_fits(plan, offload=True)
    with pytest.raises(MemoryError, match="^offload: 2 .* need 8.00 GB of .* some 2048 tokens per"):
        check_fits(plan, offload=True)


def test_scores_and_splits_are_counted(monkeypatch) -> None:
    """What XLA's attention holds of a chunk, and what the kernels before Hopper leave of a tree."""
    config = replace(tiny_target_config(), num_heads=32, num_kv_heads=8, head_width=128)
    target = TargetModel(config, batch_invariant=True)
    assert memory.score_bytes(target, 2048, 65_536) == 4 * 32 * 2048**2, "0.5 GB"
    assert memory.score_bytes(target, 64, 8192) == 4 * 32 * 64 * 1024, "a block of the cache"
    assert memory.split_bytes(target, 64) == 0, "a CPU has no such kernels"
    monkeypatch.setattr(memory.jax, "default_backend", lambda: "gpu")
    assert memory.score_bytes(target, 2048, 65_536) == 0
    for other in (TargetModel(config, "xla"), TargetModel(replace(config, head_width=512))):
        assert memory.score_bytes(other, 2048, 65_536) == 4 * 32 * 2048**2
    for capability, row in (((8, 0), 4 * splits_of(8) * 8 * 256 * 130), ((9, 0), 0)):
        monkeypatch.setattr(memory, "compute_capability", lambda found=capability: found)
        assert memory.split_bytes(target, 64) == row
