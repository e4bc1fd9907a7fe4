"""Rows, their order, their buckets, and their way to the devices."""

import json
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from longspec_jax.sharding import make_mesh
from tests.kit import each_row
from tests.train.tiny import ROOT, SyntheticRows, run_of, source_of, write_documents
from train.data.batches import Batches, BatchPlan, bucket_lengths, prefetch
from train.data.rows import PackedRows, Row, Selection, Spans
from train.data.source import Source
from train.data.tokens import read_tokens, write_tokens
from train.step import ROWS


def numbered(count: int, seq_len: int = 3) -> PackedRows:
    """Rows whose first token says which they are."""
    return PackedRows(np.arange(count * seq_len, dtype=np.uint16), seq_len)


def served(batches: Batches, step: int) -> list[int]:
    return [int(token) // 3 for token in batches(step).tokens[:, :, 0].ravel()]


def test_an_epoch_serves_every_row_once_in_an_order_of_its_own() -> None:
    batches = Batches(numbered(13), batch=4, accumulation=2, seed=5)
    assert batches.per_epoch == 3
    epochs = [sum((served(batches, 3 * e + s) for s in range(3)), []) for e in range(2)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 12 and set(epoch) <= set(range(13))
    assert epochs[0] != epochs[1]
    other = Batches(numbered(13), batch=4, accumulation=2, seed=6)
    assert served(batches, 4) == served(batches, 4) != served(other, 4)


def test_processes_share_a_batch_by_columns() -> None:
    batches = Batches(numbered(24), batch=12, accumulation=2, seed=0)
    whole = batches(1)
    assert whole.tokens.shape == (2, 6, 3) and whole.weights.dtype == np.float32
    parts = [batches(1, slice(start, start + 2)).tokens for start in (0, 2, 4)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole.tokens)


def test_prefetched_batches_are_the_batches_of_their_steps() -> None:
    """Of one length on eight devices, and of their steps' lengths on two."""
    whole = Batches(numbered(40), batch=8, accumulation=2, seed=1)
    for made, mesh in ((whole, make_mesh(2, 2, 2)), (batches(4), make_mesh(2, 1, 1))):
        sharding = NamedSharding(mesh, ROWS)
        ahead = prefetch(made, 3, sharding)
        for step in range(3, 9):
            batch, real = next(ahead)
            assert batch.tokens.sharding.is_equivalent_to(sharding, 3)
            np.testing.assert_array_equal(batch.tokens, made(step).tokens)
            np.testing.assert_array_equal(batch.weights, made(step).weights)
            assert made is whole or real == made.counted(step)[1]
        ahead.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("prefetch")]


class Short(SyntheticRows):
    """Rows of which a few tokens are padding."""

    def __getitem__(self, index: int) -> Row:
        tokens, weights, length = super().__getitem__(index)
        return Row(tokens, weights, length - index % 3)


def test_real_tokens_of_the_batch_taken_last_are_known() -> None:
    rows = Short(40, 5, 7)
    batches = Batches(rows, batch=8, accumulation=2, seed=1)
    ahead = prefetch(batches, 3, NamedSharding(make_mesh(2, 2, 2), ROWS))
    for step in (3, 4, 5):
        batch, real = next(ahead)
        known = {rows[index][0].tobytes(): rows[index].length for index in range(40)}
        taken = np.asarray(batch.tokens).reshape(-1, 5)
        assert real == sum(known[row.tobytes()] for row in taken) < taken.size
        assert batches.counted(step)[1] == real
    ahead.close()


def test_weights_of_a_run_are_those_of_its_tokens() -> None:
    ends, weights = np.asarray([3, 3, 4, 9]), np.asarray([1, 2, 0, 3], np.float32)
    whole = [1, 1, 1, 0, 3, 3, 3, 3, 3]
    for start in range(9):
        for stop in range(start + 1, 10):
            assert Spans(ends, weights).between(start, stop).tolist() == whole[start:stop]


class Broken(SyntheticRows):
    """Rows that cannot be read."""

    def __getitem__(self, index: int) -> Row:
        raise ValueError("document 7 is broken")


def test_what_goes_wrong_in_the_thread_is_raised_where_batches_are_taken() -> None:
    sharding = NamedSharding(make_mesh(1, 1, 1), ROWS)
    ahead = prefetch(Batches(Broken(9, 4, 5), 2, 1, 0), 0, sharding)
    with pytest.raises(ValueError, match="document 7 is broken"):
        next(ahead)


@each_row(("vocab", "kind"), [(65536, np.uint16), (65537, np.uint32)])
def test_token_files_are_narrow_and_whole(vocab: int, kind: type, tmp_path: Path) -> None:
    parts = [np.asarray([1, vocab - 1], np.uint32), np.asarray([], np.uint32), np.asarray([3])]
    assert write_tokens(tmp_path / "t.npy", iter(parts), vocab) == 3
    tokens = read_tokens(tmp_path / "t.npy")
    assert tokens.dtype == kind and tokens.tolist() == [1, vocab - 1, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["t.npy"]
    assert write_tokens(tmp_path / "none.npy", iter([]), vocab) == 0
    assert len(PackedRows(read_tokens(tmp_path / "none.npy"), 4)) == 0


def test_a_packed_row_is_cut_from_the_run() -> None:
    tokens, weights, _ = PackedRows(np.arange(11, dtype=np.uint16), 4)[1]
    assert tokens.tolist() == [4, 5, 6, 7] and tokens.dtype == np.int32 and weights.all()
    chosen = Selection(numbered(5), np.asarray([4, 0]))
    assert len(chosen) == 2 and chosen.seq_len == 3 and chosen[0][0][0] == 12


@each_row("pack", [False, True])
def test_measured_rows_are_never_trained_on(pack: bool, target: Path, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(1000, size=(20, 20))
    texts = [" ".join(map(str, row)) for row in numbers]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    config = run_of(files=str(tmp_path / "documents.jsonl"), pack=pack)
    [stage], source = config.stages, source_of(config, target, tmp_path)
    rows, held = source.split(stage, make_mesh(1, 2, 1))
    # Three, and one of no weight for the second device.
    assert held.tokens.shape == held.weights.shape == (4, 24)
    assert np.asarray(held.weights).any(axis=1).tolist() == [True, True, True, False]
    trained = {tuple(rows[i][0].tolist()) for i in range(len(rows))}
    measured = {tuple(row) for row in np.asarray(held.tokens)[:3].tolist()}
    assert len(measured) == 3 and not measured & trained
    if not pack:
        assert len(rows) == 17 and isinstance(held.tokens, jax.Array)
    # A run that goes on with other devices trains on the same rows.
    others, alone = source_of(config, target, tmp_path).split(stage, make_mesh(1, 1, 1))
    assert len(others) == len(rows) and alone.tokens.shape == (3, 24)
    with pytest.raises(ValueError, match="300 entries, the model vocab_size=299"):
        Source(config, tmp_path, str(target), 299).split(stage, make_mesh(1, 2, 1))


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


@each_row("buckets", [1, 2, 4])
def test_an_epoch_has_every_row_once_and_every_step_as_many_tokens(buckets: int) -> None:
    made = batches(buckets)
    lengths = ROWS_OF_MANY_LENGTHS.lengths()
    for epoch in range(2):
        seen = []
        for step in range(epoch * made.per_epoch, (epoch + 1) * made.per_epoch):
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
    plan = BatchPlan.of(np.asarray([1] * 9 + [8] * 1), (2, 4, 8), batch=2, seed=0)
    assert plan.per_epoch == 2  # Eight short rows, and the ninth next to the long one.
    steps = {plan(step).length: sorted(plan(step).rows.tolist()) for step in range(2)}
    assert set(steps) == {2, 8} and len(steps[2]) == 8 and 9 in steps[8]
    few = BatchPlan.of(np.asarray([1] * 5), (2, 4, 8), batch=2, seed=0)
    assert few.per_epoch == 1 and few(0).length == 4 and len(set(few(0).rows)) == 4
    with pytest.raises(ValueError, match="gives 3 rows, a step needs 4"):
        Batches(OfManyLengths(3, 32, 50), batch=4, accumulation=1, seed=0, buckets=3)


def test_processes_share_batches_of_every_length_by_columns() -> None:
    made = batches(4)
    for step in range(made.per_epoch):
        whole, columns = made(step), made.shape(step)[1]
        halves = [made.counted(step, slice(at, at + columns // 2)) for at in (0, columns // 2)]
        tokens = [half.tokens for half, _ in halves]
        np.testing.assert_array_equal(np.concatenate(tokens, axis=1), whole.tokens)
        # Each counts the tokens of all, whatever the lengths of its own rows.
        assert made.real(step) == sum(real for _, real in halves) == (whole.tokens > 0).sum()
    assert batches(1).real(0) is None


def planned_padding(
    rows: int, median: int, sigma: float, seq_len: int, batch: int, n: int
) -> float:
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, rows)
    lengths = np.clip(drawn.astype(int), 8, seq_len)
    plan = BatchPlan.of(lengths, bucket_lengths(seq_len, n), batch, seed=0)
    taken = np.concatenate([plan(step).rows for step in range(plan.per_epoch)])
    return 1 - lengths[taken].sum() / (plan.per_epoch * batch * seq_len)


def test_documented_padding_is_that_of_the_plan() -> None:
    listed = json.loads((ROOT / "docs" / "results" / "padding.json").read_text())["rows"]
    for row in listed:
        padding = row.pop("padding")
        shares = [planned_padding(**row, n=count) for count in range(1, 7)]
        assert [round(share, 3) for share in shares] == padding


@each_row("mask", [False, True])
def test_lengths_of_documents_are_those_of_their_rows(
    mask: bool, target: Path, tmp_path: Path
) -> None:
    files = str(write_documents(tmp_path / "a.jsonl", 40))
    run = run_of(seq_len=48, files=files, mask_prompts=mask, answer_room=9, buckets=3)
    rows, _ = source_of(run, target, tmp_path).split(run.stages[0], make_mesh(1, 1, 1))
    lengths = [rows[index].length for index in range(len(rows))]
    assert rows.lengths().tolist() == lengths and max(lengths) == 48 > min(lengths)


@each_row(
    ("changes", "sentence"),
    [
        (dict(buckets=2, pack=True), "buckets=2 is for rows of one document each"),
        (dict(buckets=8), "stage short: seq_len=1000 cannot be halved 7 times"),
    ],
)
def test_buckets_that_cannot_be_are_refused(changes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        run_of(seq_len=1000, **changes)
