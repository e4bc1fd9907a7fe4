"""Training of the parallel draft: the step of an implementation in PyTorch, meshes, chunks, labels.

The oracle computes block by block from the definition, with PyTorch's own gradients.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.checkpoints import longspec
from tests.kit import random_draft
from train.config import StageConfig
from train.drafts import block_attention
from train.drafts.kinds import KINDS, ParallelSettings
from train.target import run_target

from . import steps as tiny

pytestmark = pytest.mark.full
LENGTH, ROWS = 13, (2, 2)
STAGE = StageConfig("short", LENGTH, 4, 2, tiny.RATE, 4, 0, 0.0, 40)
SETTINGS = ParallelSettings("parallel", "", 5, 2, 4, 6, 3, 2.0, True, 4, 0.9)
DATA = tiny.random_batch(ROWS, LENGTH)


@pytest.fixture(scope="module")
def one() -> tiny.Trained:
    return tiny.four_steps(SETTINGS, tiny.given(STAGE), DATA, 16)


def oracle_rows(oracle: Any, anchors: Any, tokens: Any, places: Any, view: Any) -> Any:
    """The target's logits at the slots of every whole or cut block, and the draft's."""
    from tests.models.parallel_oracle import torch

    embedding, head = (torch.tensor(np.array(tiny.FROZEN[name])) for name in ("embedding", "head"))
    hidden, keys, values = (torch.from_numpy(np.array(each)) for each in view)
    places, text = torch.from_numpy(np.array(places)), embedding[torch.from_numpy(tokens)]
    for anchor in map(int, anchors):
        slots = np.arange(anchor, min(anchor + 4, len(tokens) - 1))
        at = torch.cat([torch.arange(anchor), torch.arange(anchor, anchor + 4).clamp(max=12)])
        found = oracle.slots(
            text[anchor], text[:anchor], places[at], keys[:anchor], values[:anchor]
        )
        logits = found[: len(slots)] @ head.T + oracle.correction(tokens[slots].tolist())
        yield slots, hidden[slots] @ head.T, logits


def oracle_loss(oracle: Any, draws: Any, views: Any) -> Any:
    """The loss of a whole batch."""
    from tests.models.parallel_oracle import torch

    decays = np.exp(-np.arange(4) / 2.0)
    decays = torch.from_numpy((3 * decays / decays.sum()).astype(np.float32))
    total = torch.zeros(())
    for a, b in np.ndindex(*ROWS):
        tokens, view = DATA.tokens[a, b], [each[b] for each in views[a][:3]]
        places, weights = draws.positions[a, b], torch.from_numpy(DATA.weights[a, b])
        for slots, wanted, logits in oracle_rows(oracle, draws.anchors[a, b], tokens, places, view):
            q, labels = logits.log_softmax(-1), torch.from_numpy(tokens[slots + 1]).long()
            text = torch.nn.functional.nll_loss(q, labels, reduction="none")
            distance = (q.exp() - wanted.softmax(-1)).abs().sum(-1)
            counts = weights[slots + 1] * decays[: len(slots)]
            total += (counts * (0.1 * text + 0.9 * distance)).sum()
    return total / DATA.weights[:, :, 1:].sum()


def test_four_steps_are_those_of_an_implementation_in_pytorch(
    one: tiny.Trained, tmp_path: Path
) -> None:
    """Loss, norm of the gradient, and parameters."""
    from tests.models.parallel_oracle import ParallelOracle, torch

    objective: Any = one.begun.trainer.objective(STAGE, 16, 0)
    layer = objective.draft.layer
    draft = {
        name: torch.tensor(each).requires_grad_()
        for name, each in tiny.tensors(one.begun, one.first, tmp_path / "first").items()
        if name not in tiny.UNREAD
    }
    oracle = ParallelOracle(
        draft, layer.num_heads, layer.num_kv_heads, 5, layer.norm_eps, layer.rope_theta, 2
    )
    view = jax.jit(lambda tokens, at: run_target(tiny.TARGET, tiny.FROZEN, tokens, at)[:3])

    def loss(step: int) -> Any:
        key = jax.random.fold_in(jax.random.key(tiny.SEED), step)
        draws = jax.device_get(objective.draw(key, ROWS, LENGTH))
        views = [jax.device_get(view(DATA.tokens[a], draws.positions[a])) for a in range(2)]
        return oracle_loss(oracle, draws, views)

    tiny.assert_learns_as_pytorch(one, draft, loss, tmp_path / "last")
    # What is measured: agreement with the target's choice, of blocks that are learned whole.
    measured = objective.measure(one.last, one.begun.frozen, jax.tree.map(lambda x: x[0], DATA))
    plain, hits = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (2, LENGTH)), []
    with torch.no_grad():
        whole = jax.device_get(view(DATA.tokens[0], plain))
        for b in range(2):
            about = DATA.tokens[0, b], plain[b], [each[b] for each in whole]
            for slots, wanted, logits in oracle_rows(oracle, range(0, LENGTH, 3), *about):
                if len(slots) == 4 and DATA.weights[0, b, slots + 1].all():
                    hits.append((wanted.argmax(-1) == logits.argmax(-1)).numpy())
    assert len(hits) > 1
    for slot, share in enumerate(np.mean(hits, axis=0)):
        assert measured[f"agree_top1_shift{slot + 1}"] == pytest.approx(share, abs=1e-4)


def test_devices_and_chunks_do_not_change_the_step(
    one: tiny.Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block at a time, and a few slots of the loss, the last of which are not a whole chunk."""
    monkeypatch.setattr(block_attention, "SCORES", 4 * 4 * 4 * 17)
    given = tiny.given(STAGE, fsdp=2, tp=2)
    tiny.assert_same_steps(tiny.four_steps(SETTINGS, given, DATA, 10, 8), one)


def test_a_draft_begins_with_a_folder(one: tiny.Trained, tmp_path: Path) -> None:
    """A parallel one of the same shape, or a LongSpec draft, whose layer becomes the first."""
    config = one.begun.trainer.draft.layer
    layer = random_draft(config)
    longspec.save_draft(tmp_path / "longspec", config, layer, target=tiny.TARGET)

    def begun(settings: ParallelSettings) -> Any:
        return KINDS["parallel"].begin(settings, tiny.given(STAGE))

    trainer, _, params = begun(replace(SETTINGS, init=str(tmp_path / "longspec")))
    jax.tree.map(np.testing.assert_array_equal, params["layers_0"], layer)
    fresh = begun(SETTINGS)
    assert fresh.params is None and fresh.trainer == replace(trainer, settings=SETTINGS)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, one.first)
    trainer.save(tmp_path / "own", params)
    again = begun(replace(SETTINGS, init=str(tmp_path / "own"))).params
    jax.tree.map(np.testing.assert_array_equal, again, params)
    with pytest.raises(ValueError, match="draft.block=6, and the draft .* has 4; set --config"):
        begun(replace(SETTINGS, init=str(tmp_path / "own"), block=6))
