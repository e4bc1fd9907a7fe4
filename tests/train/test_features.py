"""Stored features give the losses of the target's own forward; damage and mixing are refused."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit import each_row, random_target, tiny_target_config
from tests.train.tiny import (
    ROOT,
    assert_learns_of_stored_features,
    command,
    conversations,
    flip_a_bit,
    save_tiny_target,
)
from train import features, prepare
from train.step import Batch
from train.target import plain_positions, run_target
from train.views import Reads, parts_of_rows, target_view

SMALL = [
    *("--config.data.answer_room=16", "--config.accept_rows=2", "--config.accept_every=0"),
    *("--config.dtype=float32", "--config.mesh.fsdp=2"),
]
KINDS = {
    "sft": ["--config.draft.window=7", "--config.draft.init=", "--config.draft.distillation=0.5"],
    "eagle3": [
        *("--config.draft.layers=0", "--config.draft.vocabulary=64", "--config.draft.steps=2")
    ],
    "dflash": ["--config.draft.features=0", "--config.draft.layers=1", "--config.draft.block=4"],
}


def given(tmp_path: Path, variant: str) -> list[str]:
    stage = "sft" if variant == "sft" else "chat"
    small = dict(batch=8, seq_len=40, accumulation=2, epochs=2)
    return [
        f"--config={ROOT}/configs/vicuna7b.py:{variant}",
        f"--config.target={tmp_path / 'target'}",
        f"--config.data.files={tmp_path / 'chats.jsonl'}",
        *(f"--config.stages.{stage}.{name}={value}" for name, value in small.items()),
        *SMALL,
        *("--config.data.buckets=1", *KINDS[variant]),
    ]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    save_tiny_target(folder / "target")
    conversations(folder / "chats.jsonl", 34)
    return folder


@pytest.mark.full
def test_a_run_learns_the_same_bits_without_the_targets_forward(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kinds: :mod:`.drafts.test_run`."""
    run = given(here, "sft")
    assert command(*run, f"--workdir={tmp_path / 'online'}") == 0
    assert_learns_of_stored_features(tmp_path / "online", run, tmp_path, monkeypatch)


def test_shards_are_resumed_checked_and_not_mixed(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, workdir = tmp_path / "features", f"--workdir={tmp_path / 'run'}"
    stored = [*given(here, "dflash"), f"--config.features.folder={folder}", workdir]
    monkeypatch.setattr(features, "SHARD", 70_000)

    def refused(*more: str) -> str:
        capsys.readouterr()
        assert command(*stored, *more) == 2
        return capsys.readouterr().err

    assert f"{folder / 'chat'} has no features; python -m train.prepare with" in refused()
    # Killed in the second shard: the first is not made again.
    write, written = features.Features.write, []

    def writing(self: features.Features, shard: int, rows: Any) -> None:
        written.append(shard)
        if written == [0, 1]:
            raise OSError("killed")
        write(self, shard, rows)

    monkeypatch.setattr(features.Features, "write", writing)
    assert prepare.main(stored) == 2
    assert "is incomplete: 2 of 3 shards are missing or cut, the first is 00001.bin" in refused()
    assert prepare.main(stored) == 0 and written == [0, 1, 1, 2]
    assert "128 bytes a token" in capsys.readouterr().out

    # Those of another kind or dtype, or of a target that has changed since.
    layer = "hidden states after layers 0"
    said = refused("--config.dtype=bfloat16")
    assert "has features of something else" in said and "=bfloat16 (was float32)" in said
    capsys.readouterr()
    assert command(*given(here, "eagle3"), stored[-2], workdir) == 2
    said = capsys.readouterr().err
    assert f"features=final hidden states and {layer} (was {layer})" in said
    tensor = here / "target" / "model.safetensors"
    whole = tensor.read_bytes()
    tensor.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        assert "the target=" in refused()
        assert prepare.main(stored) == 2
        assert "the target=" in capsys.readouterr().err
    finally:
        tensor.write_bytes(whole)

    # A flipped bit is found when its row is read.
    binary = folder / "chat" / "00001.bin"
    flip_a_bit(binary)
    said = refused()
    assert f"{binary}: row " in said and "is damaged; delete this file and run the same" in said
    binary.unlink()
    assert prepare.main(stored) == 0 and written == [0, 1, 1, 2, 1]
    assert command(*stored) == 0


def test_a_stage_that_draws_positions_runs_the_target(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [option.replace("sft", "short") for option in given(here, "sft")]
    run += ["--config.stages.short.max_offset=9", f"--workdir={tmp_path / 'run'}"]
    stored = [*run, f"--config.features.folder={tmp_path / 'features'}"]
    assert prepare.main(stored) == 0
    assert "stage short draws positions: nothing is stored" in capsys.readouterr().out
    assert not (tmp_path / "features").exists()


def test_parts_are_read_as_they_were_computed(tmp_path: Path) -> None:
    """Of rows of two lengths, read back from files; 0 after a row's end."""
    target = tiny_target_config(num_layers=3)
    params, reads = random_target(target), Reads(True, True, (-1, 1))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 101, (2, 11)))
    parts = jax.device_get(parts_of_rows(target, reads, 0, params, tokens))
    lengths = np.array([11, 7])
    shape: Any = dict(together=2, longest=11)
    folder = features.create(tmp_path, {}, layout_of(parts), lengths, **shape)
    rows = [{n: each[i, :size] for n, each in parts.items()} for i, size in enumerate(lengths)]
    folder.write(0, rows)
    read = features.open_features(tmp_path, {}, lengths).read([1, 0], 9)
    batch = Batch(tokens[::-1, :9], None, read)
    found = target_view(target, None, batch, jnp.zeros(()), 0, reads.kept)
    positions = plain_positions((1, 2), 11)[0]
    view = jax.jit(partial(run_target, target, keep=reads.kept))(params, tokens, positions)
    for wanted, one in zip(*map(jax.tree.leaves, (view, found)), strict=True):
        wanted = np.array(wanted)[::-1, :9]
        wanted[0, 7:] = 0
        np.testing.assert_array_equal(one, wanted)


DAMAGED = "{", "[]", '{"crc32": []}'


@each_row("name, content", product(["features.json", "00000.json"], DAMAGED))
def test_a_damaged_description_is_named(name: str, content: str, tmp_path: Path) -> None:
    parts = [features.Part("hidden", "float32", (2,))]
    made = features.create(tmp_path, {}, parts, np.array([1, 1]), together=2, longest=1)
    made.write(0, [{"hidden": np.zeros((1, 2), np.float32)}] * 2)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"is damaged; delete this file and run the same"):
        features.open_features(tmp_path, {}, made.lengths).read([1], 1)


def layout_of(parts: Any) -> list[features.Part]:
    return [features.Part(name, each.dtype.name, each.shape[2:]) for name, each in parts.items()]


def test_a_target_that_is_not_trained_yet_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [f"--config={ROOT}/configs/demo.py:tiny", f"--workdir={tmp_path / 'run'}"]
    assert prepare.main([*run, f"--config.features.folder={tmp_path / 'features'}"]) == 2
    assert "trains its target, which is not there yet" in capsys.readouterr().err
