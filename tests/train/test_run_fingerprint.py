"""What makes a run another one, and what does not."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs import demo, vicuna7b
from train.config import RunConfig, from_config
from train.fingerprint import check_same_run, draft_settings, model_digest, target_settings


def run_with(**changes: Any) -> RunConfig:
    config = vicuna7b.get_config("short")
    for path, value in changes.items():
        node = config
        *parents, last = path.split("__")
        for parent in parents:
            node = node[parent]
        node[last] = value
    return from_config(config.to_dict())


def settings(**changes: Any) -> dict[str, Any]:
    run = run_with(**changes)
    return draft_settings(run, run.stages[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 7),
        ("dtype", "float32"),
        ("optimizer__clip", 2.0),
        ("draft__max_shift", 2),
        ("data__answer_room", 8),
        ("stages__short__learning_rate", 0.1),
        ("stages__short__seq_len", 2048),
        ("stages__short__epochs", 2),
    ],
)
def test_what_changes_training_is_named_as_it_is_typed(field: str, value: Any) -> None:
    before, after = settings(), settings(**{field: value})
    name = f"--config.{field.replace('__', '.')}"
    assert [key for key in before if before[key] != after[key]] == [name]
    saved = json.loads(json.dumps(before))
    with pytest.raises(ValueError, match=f"{name}={value} [(]was {before[name]}[)]; restore"):
        check_same_run(saved, after, Path("checkpoints/short/4"))
    check_same_run(saved, before, Path())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mesh__tp", 2),
        ("loss_chunk", 64),
        ("mlp_chunk", 64),
        ("target_loss_every", 3),
        ("save_every", 1),
        ("log_every", 5),
        ("log__wandb", "drafts"),
        ("max_to_keep", 9),
        ("export", "x"),
        ("data__files", "elsewhere.jsonl"),
        ("draft__init", "elsewhere"),
        ("target", "elsewhere"),
        ("stages__short__accumulation", 32),
    ],
)
def test_where_things_lie_and_how_work_is_cut_is_free(field: str, value: Any) -> None:
    assert settings(**{field: value}) == settings()


def test_a_run_may_be_profiled_when_it_is_resumed() -> None:
    assert settings(profile_at=9, profile_steps=2) == settings()


def test_draws_of_a_micro_batch_depend_on_how_the_work_is_cut() -> None:
    one, other = (
        settings(draft__per_row=False, stages__short__accumulation=count) for count in (16, 32)
    )
    assert one != other


def test_a_target_that_is_trained_counts_its_shape_and_no_draft() -> None:
    run = from_config(demo.get_config("tiny").to_dict())
    assert run.pretraining is not None
    stage, shape = run.pretraining.stages[0], run.pretraining.shape
    before = target_settings(run, shape, stage)
    assert before == target_settings(
        dataclasses.replace(run, draft=dataclasses.replace(run.draft, window=3)), shape, stage
    )
    after = target_settings(run, dataclasses.replace(shape, num_layers=7), stage)
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["--config.pretraining.shape.num_layers"]
    assert "--config.pretraining.stages.short.learning_rate" in before


def test_a_model_is_what_its_files_hold(tmp_path: Path) -> None:
    def model(name: str, value: float, width: int = 3) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"width": width}))
        save_file({"w": np.full(5, value, np.float32)}, folder / "model.safetensors")
        return model_digest(folder)

    first = model("first", 1.0)
    assert first == model("copy", 1.0)
    assert len({first, model("weights", 2.0), model("width", 1.0, width=4)}) == 3
