"""What holds of every kind of draft: its state follows from the text, and 8 bits serve as well."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from longspec_jax import LongSpec
from longspec_jax.cli import as_options, draft_option
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Needs, Params
from longspec_jax.drafters.checkpoints import dflash as files
from longspec_jax.drafters.checkpoints.parallel import save_draft as save_parallel
from longspec_jax.drafters.dflash import DFlashDrafter
from longspec_jax.drafters.eagle3 import Eagle3Drafter
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.drafters.peagle import PEagleDrafter
from longspec_jax.drafters.small_lm import SmallLMDrafter
from tests.decoding.lossless import CONFIG, LONGSPEC, SMALL, TRANSFORMER
from tests.drafters.dflash import test_drafter as dflash
from tests.drafters.eagle3 import test_drafter as eagle3
from tests.drafters.kit import assert_partitioned, extended, proposed, without_tables
from tests.drafters.parallel import test_drafter as parallel
from tests.drafters.peagle import test_drafter as peagle
from tests.infer.toys import save_toy, toy_spec
from tests.kit import in_tiers, normal, random_target, relative_error

TOKENS = np.random.default_rng(2).integers(0, SMALL.vocab_size, (2, 16)).astype(np.int32)
HIDDEN = [np.asarray(normal(seed, 2, 16, CONFIG.model_width)) for seed in range(3)]
COUNTS = [[5, 1], [0, 3], [2, 0], [5, 4], [4, 3]]
"""Tokens that each of two rows commits of blocks of five: paths accepted in part, and no token."""


class Kind(NamedTuple):
    """A drafter and its parameters."""

    drafter: Any
    draft: Any
    features: int = 0
    """Hidden states of the target that it reads."""
    counts: list[list[int]] = COUNTS
    by_slot: bool = False
    """Whether slots after the committed tokens may hold anything."""


DFLASH = DFlashDrafter(dflash.DFLASH, sinks=2, window=12)
LONGSPEC_RING = LongSpecDrafter(DraftConfig.for_target(CONFIG, window=5), TreeConfig((2, 2, 2)))
KINDS = {
    "longspec": Kind(LONGSPEC_RING, LONGSPEC),
    "small_lm": Kind(SmallLMDrafter(SMALL), random_target(SMALL, seed=3), by_slot=True),
    "eagle3": Kind(
        *(eagle3.WINDOW, eagle3.random_params(eagle3.DRAFT, eagle3.KNOWN), 3),
        [[5, 1], [0, 3], [2, 0], [5, 4], [3, 3], [1, 0]],
    ),
    "peagle": Kind(peagle.WINDOW, peagle.random_params(peagle.DRAFT, peagle.KNOWN), 3),
    "dflash": Kind(DFLASH, dflash.random_params(dflash.DFLASH), 3),
    "parallel": Kind(parallel.DRAFTER, parallel.bound().draft, counts=[[5, 1], [0, 3], [5, 0]]),
}


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_any_count_make_the_state_of_the_whole_text(name: str) -> None:
    """With garbage after what counts, and rows that stand still."""
    drafter, draft, features, counts, by_slot = KINDS[name]
    params, hidden = Params(TRANSFORMER.params, draft), HIDDEN[:features]
    begun = drafter.begin(params, 2, 16)
    at, total = np.zeros(2, np.int32), np.sum(counts, axis=0, dtype=np.int32)
    whole = extended(drafter, params, begun, (TOKENS, at, total, *hidden))
    state = begun
    for count in np.array(counts, np.int32):
        index = np.minimum(at[:, None] + np.arange(5), 15)
        garbage = np.arange(5) >= count[:, None]
        beside = [each[np.arange(2)[:, None], index] for each in hidden]
        states = [np.where(garbage[..., None], 99.0, each) for each in beside]
        fresh = np.where(garbage, 7, np.take_along_axis(TOKENS, index, axis=1))
        state = extended(drafter, params, state, (fresh, at, count, *states))
        at = at + count  # A new one: the program may still read the old.
    if by_slot:
        rows = list(enumerate(total))
        state, whole = (
            [leaf[row, :, :end] for leaf in jax.tree.leaves(each) for row, end in rows]
            for each in (state, whole)
        )
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), state, whole)


ROUNDED = {
    "eagle3": (Eagle3Drafter(eagle3.DRAFT, TreeConfig((1, 1, 1))), KINDS["eagle3"].draft),
    "peagle": (
        PEagleDrafter(peagle.DRAFT, TreeConfig((1,) * 4)),
        peagle.random_params(peagle.DRAFT, peagle.KNOWN),
    ),
    "dspark": (
        DFlashDrafter(dflash.DSPARK, TreeConfig((1,) * 4)),
        dflash.random_params(dflash.DSPARK, dflash.KNOWN),
    ),
    "dflash2": (
        DFlashDrafter(dflash.DFLASH2, TreeConfig((1,) * 4)),
        dflash.random_params(dflash.DFLASH2),
    ),
}
PARAMETERS = "layer", "head", "embedding", "markov", "confidence", "selector"


@pytest.mark.parametrize("name", in_tiers(ROUNDED, "dspark"))
def test_8_bits_and_meshes(name: str) -> None:
    """Rounded weights compute nearly the same, and every parameter has a rule of partition."""
    drafter, params = ROUNDED[name]
    rounded = params.in_int8()
    with pytest.raises(ValueError, match="in 8 bits already"):
        rounded.in_int8()
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (8, 8)).astype(np.int32)
    hidden = [np.asarray(normal(seed, 8, 8, CONFIG.model_width)) for seed in range(3)]
    block = tokens, np.zeros(8, np.int32), np.full(8, 8, np.int32), *hidden
    pending = dflash.KNOWN[:8].astype(np.int32)
    following = np.zeros((8, drafter.tree.num_levels), np.int64)
    (_, exact), (_, near) = (
        proposed(drafter, Params(None, each), block, pending, following)
        for each in (params, rounded)
    )
    both = np.isfinite(near[-1]) & np.isfinite(exact[-1])
    assert 0 < relative_error(np.asarray(near[-1])[both], np.asarray(exact[-1])[both]) < 0.05
    for each in (params, rounded):
        assert_partitioned({part: getattr(each, part, None) for part in PARAMETERS})


def test_a_folder_is_all_that_a_user_names(tmp_path: Path) -> None:
    """With the options of the commands."""
    target, _ = save_toy(tmp_path)
    config = toy_spec().target_config
    draft = dflash.config_for(config, features=(-1, 0, 0))
    files.save_draft(tmp_path / "dflash", draft, without_tables(dflash.random_params(draft)))
    options = as_options([draft_option("window=16"), draft_option("sinks=0")])
    spec = LongSpec.from_pretrained(target, [tmp_path / "dflash", "ngram"], draft_options=options)
    own, _ = spec.drafts
    assert own.seen == (16, 0) and own.params.embedding is spec.target_params["embedding"]
    assert own.drafter(PLAIN).needs == Needs(hidden=(-1, 0), recent=16)
    layers = parallel.config_for(config)
    save_parallel(tmp_path / "parallel", layers, parallel.random_tree(layers), target=config)
    spec = LongSpec.from_pretrained(target, tmp_path / "parallel", draft_options={"int8": True})
    assert spec.drafts[0].name == "parallel" and spec.drafts[0].params.int8
