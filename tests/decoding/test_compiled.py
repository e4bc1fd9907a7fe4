"""What the compiled round must not do: copy a cache, or need memory that grows with one."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.prefill import vacant
from longspec_jax.decoding.report import TOKENS
from longspec_jax.decoding.round import many_rounds, one_round
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.dflash import DFlashDrafter
from longspec_jax.drafters.eagle3 import Eagle3Drafter
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.drafters.parallel import ParallelDrafter, ParallelParams
from longspec_jax.drafters.peagle import PEagleDrafter
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import AttentionRetriever, Quest, SinksAndRecent
from longspec_jax.drafters.retrieval.working_cache import WorkingCache
from longspec_jax.drafters.small_lm import SmallLMDrafter
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.drafters.dflash import toys as dflash_toys
from tests.drafters.eagle3 import toys as eagle3_toys
from tests.drafters.parallel import toys as parallel_toys
from tests.drafters.peagle import toys as peagle_toys
from tests.kit import (
    ALL_PASSES,
    draft_params,
    in_tiers,
    random_draft,
    random_target,
    tiny_target_config,
)

CONFIG = tiny_target_config(num_layers=1)
DRAFT = DraftConfig.for_target(CONFIG, window=11)
SMALL = tiny_target_config(num_layers=2)
CAPACITY = 1 << 24
"""Of a cache that is never made. All that grows with it shows in one program, for it is larger than
whatever does not."""


def compiled_loop(
    batch: int,
    capacity: int = CAPACITY,
    *,
    streams: bool = False,
    plain: bool = False,
    drafter: Drafter | None = None,
    params: Any = None,
    small: TreeConfig | None = None,
    working: WorkingCache | None = None,
    config: TargetConfig = CONFIG,
    slots: list[int] | None = None,
) -> jax.stages.Compiled:
    """Many rounds for a cache of this capacity, or a single one; of these slots, or of all."""
    draft = DraftConfig.for_target(config, window=11)
    target, drafter = TargetModel(config), drafter or LongSpecDrafter(draft, TreeConfig((3, 2)))
    table = random_target(config)
    own = draft_params(random_draft(draft), table) if params is None else params
    params = Params(table, own)
    if plain:
        drafter, params = NoDraft(), Params(table, None)
    if small is not None:
        drafter = SmallLMDrafter(SMALL, small, working=working)
        params = Params(table, random_target(SMALL))
    empty = partial(vacant, target, drafter, params, batch=batch, capacity=capacity, stop_width=1)
    args = target, drafter, SamplingKind.GREEDY, params, jax.eval_shape(empty)
    some = TOKENS, None if slots is None else np.asarray(slots, np.int32)
    if streams:
        return one_round.lower(*args, *some).compile(ALL_PASSES)
    return many_rounds.lower(*args, np.int32(16), *some).compile(ALL_PASSES)


def assert_nothing_grows(
    compiled: jax.stages.Compiled, copied: int, scores: int = 0, config: TargetConfig = CONFIG
) -> None:
    """No copy of the cache of ``copied`` rows, and temporary memory of only these float32 scores.

    A quarter of a byte a position is what a program may take besides, whatever the capacity.
    """
    assert cache_sized(compiled.as_text(), copied, CAPACITY, config) == []
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * scores + CAPACITY // 4


def cache_sized(text: str, batch: int, capacity: int, config: TargetConfig = CONFIG) -> list[str]:
    """Instructions of the compiled program that copy or reorder a whole cache array."""
    elements = batch * config.num_kv_heads * capacity * config.head_width
    found = []
    for line in text.splitlines():
        match = re.search(r"= \w+\[([\d,]+)\]\S* (copy|copy-start|transpose|concatenate)\(", line)
        if match and math.prod(map(int, match[1].split(","))) >= elements:
            found.append(line.strip())
    return found


TREE = TreeConfig((3, 2))
CHAIN = TreeConfig((1,) * 3)
STREAMING = StreamingDrafter(TreeConfig((2, 1)), SinksAndRecent(3, 64))
SOME = BlockBudget(128, 8, 16, 8)
HIERARCHY = PartialVerifier(STREAMING, SinksAndRecent(3, 128), CHAIN)
QUEST = PartialVerifier(STREAMING, Quest(CONFIG, SOME), CHAIN)
ATTENDED = PartialVerifier(STREAMING, AttentionRetriever(CONFIG, SOME), CHAIN)
WORKING = WorkingCache(BlockBudget(64, 8, 16, 8), CONFIG)
LOOKING = LongSpecDrafter(DRAFT, TREE, working=WORKING)
SIZES: dict[str, Any] = dict(num_kv_heads=2, head_width=CONFIG.head_width)
EAGLE3 = eagle3_toys.config_for(CONFIG, features=(-1, 0), **SIZES)
DFLASH = dflash_toys.config_for(CONFIG, features=(-1, 0), trunk=SIZES)
PEAGLE = peagle_toys.config_for(CONFIG, features=(-1, 0), **SIZES)
PARALLEL = parallel_toys.config_for(CONFIG)
SCORES = 2 * CONFIG.num_heads * CAPACITY
"""Of a row's query to every position, and the same as shares."""
KINDS: dict[str, tuple[Drafter, Any]] = {
    "eagle3": (Eagle3Drafter(EAGLE3, TREE), eagle3_toys.random_params(EAGLE3)),
    "dflash": (DFlashDrafter(DFLASH, TREE), dflash_toys.random_params(DFLASH)),
    "peagle": (PEagleDrafter(PEAGLE, TREE), peagle_toys.random_params(PEAGLE)),
    "parallel": (
        ParallelDrafter(PARALLEL, TREE),
        ParallelParams.with_target_tables(
            random_target(CONFIG), parallel_toys.random_tree(PARALLEL)
        ),
    ),
}
ROUNDS: dict[str, tuple[dict[str, Any], int, int]] = {
    "a row": (dict(batch=1), 1, 0),
    "a round of its own": (dict(batch=3, streams=True), 1, 0),
    # What speculation is compared with must not be slowed down.
    "plain": (dict(batch=3, plain=True), 1, 0),
    "plain, a round of its own": (dict(batch=1, streams=True, plain=True), 1, 0),
    "two slots": (dict(batch=3, slots=[2, 0]), 1, 0),
    "a plain slot": (dict(batch=3, streams=True, plain=True, slots=[1]), 1, 0),
    # What a partial forward sees of the cache is read where it lies.
    "streaming": (dict(batch=1, drafter=STREAMING), 1, 0),
    "hierarchy": (dict(batch=3, drafter=HIERARCHY), 3, 0),
    # Neither the cache nor the summaries of its blocks: there are scores, and sums of them.
    "quest": (dict(batch=3, drafter=QUEST), 3, 6 * CONFIG.num_kv_heads * CAPACITY // 8),
    "attended": (dict(batch=1, drafter=ATTENDED), 1, SCORES),
    # Adaptive runs keep the small model up to date in plain rounds.
    "small_lm, a row": (dict(batch=1, streams=True, small=TREE), 1, 0),
    "small_lm": (dict(batch=3, streams=True, small=TREE), 3, 0),
    "small_lm, plain": (dict(batch=1, streams=True, small=TreeConfig(())), 1, 0),
    # Entries of committed tokens are written where they lie.
    **{
        name: (dict(batch=3, streams=True, drafter=drafter, params=params), 3, 0)
        for name, (drafter, params) in KINDS.items()
    },
    # Neither the cache that is read nor the target's, to which the look is conditional.
    "working": (dict(batch=3, streams=True, drafter=LOOKING), 3, 3 * SCORES),
    "small_lm, working": (dict(batch=3, streams=True, small=TREE, working=WORKING), 3, 3 * SCORES),
}
"""What is compiled, the rows of the cache that no instruction may copy, and float32 scores."""


FIRST = "a round of its own", "two slots", "hierarchy", "quest", "eagle3", "working"


@pytest.mark.parametrize("name", in_tiers(ROUNDS, *FIRST))
def test_no_cache_sized_copy(name: str) -> None:
    given, copied, scores = ROUNDS[name]
    assert_nothing_grows(compiled_loop(**given), copied, scores)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "drafter", [STREAMING, PartialVerifier(STREAMING)], ids=["streaming", "hierarchy"]
)
def test_partial_passes_with_the_kernels_copy_nothing(drafter: Drafter, batch: int) -> None:
    config = tiny_target_config(num_heads=6, head_width=64, dtype="bfloat16")
    text = compiled_loop(batch, 8192, drafter=drafter, config=config).as_text()
    assert "append_rows" in text and "prefix_attention" in text
    assert cache_sized(text, batch, 8192, config) == []


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [6, 30], ids=["triton", "mosaic"])
@pytest.mark.parametrize("way", ["loop", "round"])
def test_no_cache_sized_copy_with_the_kernels(batch: int, heads: int, way: str) -> None:
    """Thirty heads make 150 rows of a key/value head: the Hopper kernel, where there is one."""
    config = tiny_target_config(num_heads=heads, head_width=64, dtype="bfloat16")
    compiled = compiled_loop(batch, 8192, streams=way == "round", config=config)
    assert "append_rows" in compiled.as_text()
    assert cache_sized(compiled.as_text(), batch, 8192, config) == []


def test_the_search_finds_a_planted_copy() -> None:
    """Negative controls: a transposed cache is reported, and a flag for each of its positions."""
    planted = "  %t = f32[2,4096,2,6]{3,2,1,0} transpose(%cache), dimensions={0,2,1,3}"
    assert cache_sized(planted, 2, 4096) == [planted.strip()]
    assert cache_sized(planted, 4, 4096) == []
    flags = jax.jit(lambda x: jnp.sort(x > 0).argmax())
    compiled = flags.lower(jax.ShapeDtypeStruct((CAPACITY,), "float32")).compile(ALL_PASSES)
    with pytest.raises(AssertionError):
        assert_nothing_grows(compiled, 1)
