"""Rows by their length: every row once an epoch, in few shapes of as many places for tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import NamedSharding

from configs.vicuna7b import get_config
from longspec_jax.sharding import make_mesh
from tests.train.tiny import ROOT, save_tiny_target, write_documents
from train.config import from_config
from train.data.batches import Batches, Row, SyntheticRows, prefetch
from train.data.buckets import Plan, bucket_lengths
from train.data.documents import DocumentRows
from train.data.rows import Source
from train.step import ROWS


class OfManyLengths(SyntheticRows):
    """Rows as long as chats are; the first token says which row it is, 0 pads."""

    def lengths(self) -> np.ndarray:
        drawn = np.random.default_rng(1).lognormal(np.log(self.seq_len / 8), 1, self.count)
        return np.clip(drawn.astype(int), 1, self.seq_len)

    def __getitem__(self, index: int) -> Row:
        length = int(self.lengths()[index])
        tokens = np.where(np.arange(self.seq_len) < length, index + 1, 0).astype(np.int32)
        return Row(tokens, (tokens > 0).astype(np.float32), length)


ROWS_OF_MANY_LENGTHS = OfManyLengths(211, 32, 50)


def batches(buckets: int, seed: int = 0) -> Batches:
    return Batches(ROWS_OF_MANY_LENGTHS, batch=4, accumulation=2, seed=seed, buckets=buckets)


def test_lengths_are_halves_of_each_other() -> None:
    assert bucket_lengths(96, 1) == (96,) and bucket_lengths(96, 4) == (12, 24, 48, 96)


@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_an_epoch_has_every_row_once_and_every_step_as_many_tokens(buckets: int) -> None:
    made = batches(buckets)
    lengths = ROWS_OF_MANY_LENGTHS.lengths()
    for epoch in range(2):
        seen = []
        for step in range(epoch * made.per_epoch, (epoch + 1) * made.per_epoch):
            assert made.position(step) == (epoch, len(seen))
            batch, real = made.counted(step)
            assert batch.tokens.shape == batch.weights.shape == made.shape(step)
            assert batch.tokens.size == 4 * 32 and batch.tokens.shape[0] == 2
            rows = batch.tokens[..., 0].ravel() - 1
            # No token is lost.
            assert real == batch.weights.sum() == (batch.tokens > 0).sum() == lengths[rows].sum()
            seen += rows.tolist()
        assert len(seen) == len(set(seen)) and 211 - len(seen) < 4
    assert len({made.shape(step) for step in range(made.per_epoch)}) == buckets


def test_padding_falls_with_every_bucket() -> None:
    shares = []
    for buckets in (1, 2, 3, 4):
        made = batches(buckets)
        counted = [made.counted(step) for step in range(made.per_epoch)]
        shares.append(1 - sum(real for _, real in counted) / (len(counted) * 4 * 32))
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.75 and shares[-1] < 0.45


def test_the_plan_is_that_of_its_seed_and_mixes_lengths() -> None:
    made, again, other = batches(4), batches(4), batches(4, seed=1)
    shapes = [made.shape(step) for step in range(made.per_epoch)]
    for step in (made.per_epoch + 1, 2):  # Asked for in any order.
        np.testing.assert_array_equal(made(step).tokens, again(step).tokens)
    assert shapes != sorted(shapes) and shapes != sorted(shapes, reverse=True)
    assert [other.shape(step) for step in range(other.per_epoch)] != shapes


def test_what_fills_no_step_goes_to_the_next_bucket() -> None:
    plan = Plan.of(np.asarray([1] * 9 + [8] * 1), (2, 4, 8), batch=2, seed=0)
    assert plan.per_epoch == 2  # Eight short rows, and the ninth beside the long one.
    steps = {plan(step).length: sorted(plan(step).rows.tolist()) for step in range(2)}
    assert set(steps) == {2, 8} and len(steps[2]) == 8 and 9 in steps[8]
    few = Plan.of(np.asarray([1] * 5), (2, 4, 8), batch=2, seed=0)
    assert few.per_epoch == 1 and few(0).length == 4 and len(set(few(0).rows)) == 4
    with pytest.raises(ValueError, match="gives 3 rows, a step needs 4"):
        Batches(OfManyLengths(3, 32, 50), batch=4, accumulation=1, seed=0, buckets=3)


def test_processes_share_batches_of_every_length_by_columns() -> None:
    made = batches(4)
    for step in range(made.per_epoch):
        whole, columns = made(step), made.shape(step)[1]
        halves = [made(step, slice(at, at + columns // 2)).tokens for at in (0, columns // 2)]
        np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole.tokens)


def test_prefetched_batches_have_the_lengths_of_their_steps() -> None:
    made = batches(4)
    ahead = prefetch(made, 3, NamedSharding(make_mesh(2, 1, 1), ROWS))
    for step in range(3, 9):
        batch = next(ahead)
        np.testing.assert_array_equal(batch.tokens, made(step).tokens)
        assert ahead.real_tokens == made.counted(step)[1]
    ahead.close()


def planned_padding(
    rows: int, median: int, sigma: float, seq_len: int, batch: int, n: int
) -> float:
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, rows)
    lengths = np.clip(drawn.astype(int), 8, seq_len)
    plan = Plan.of(lengths, bucket_lengths(seq_len, n), batch, seed=0)
    taken = np.concatenate([plan(step).rows for step in range(plan.per_epoch)])
    return 1 - lengths[taken].sum() / (plan.per_epoch * batch * seq_len)


def test_documented_padding_is_that_of_the_plan() -> None:
    listed = json.loads((ROOT / "docs" / "results" / "padding.json").read_text())["rows"]
    page = (ROOT / "docs" / "data.md").read_text()
    for row in listed:
        told = row.pop("padding")
        shares = [planned_padding(**row, n=count) for count in range(1, 7)]
        assert [round(share, 3) for share in shares] == told
        assert " | ".join(f"{share:.0%}".replace("%", " %") for share in shares) in page


@pytest.mark.parametrize("mask", [False, True])
def test_lengths_of_documents_are_those_of_their_rows(mask: bool, tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target")
    config = get_config("short")
    files = str(write_documents(tmp_path / "a.jsonl", 40))
    config.data.update(files=files, mask_prompts=mask, answer_room=9, buckets=3)
    config.stages.short.update(seq_len=48, batch=4, accumulation=1)
    run = from_config(config.to_dict())
    source = Source(run, tmp_path, str(target), 304)
    rows, _ = source.split(run.stages[0], make_mesh(1, 1, 1))
    lengths = [rows[index].length for index in range(len(rows))]
    assert rows.lengths().tolist() == lengths and max(lengths) == 48 > min(lengths)
    lazy = DocumentRows([source._documents[i] for i in range(40)], run.data, 48, 2)
    assert set(lengths) <= set(lazy.lengths().tolist())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(buckets=0), "buckets=0 must be 1 to 8"),
        (dict(buckets=9), "buckets=9 must be 1 to 8"),
        (dict(buckets=2, pack=True), "buckets=2 is for rows of one document each"),
        (dict(buckets=8), "stage short: seq_len=1000 cannot be halved 7 times"),
    ],
)
def test_buckets_that_cannot_be_are_refused(changes: dict[str, int], sentence: str) -> None:
    config = get_config("short")
    config.data.update(**changes)
    config.stages.short.seq_len = 1000
    with pytest.raises(ValueError, match=sentence):
        from_config(config.to_dict())
