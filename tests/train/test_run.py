"""The training command on Vicuna's configuration, end to end at toy scale, and its mistakes."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from absl import logging

from longspec_jax import cli, files
from longspec_jax.drafters.checkpoints.longspec import load_draft
from longspec_jax.weights.hf import load_target
from tests.children import ran
from tests.kit import each_row
from tests.train.tiny import (
    ROOT,
    arguments,
    assert_same_run,
    command,
    interrupted,
    records,
    write_documents,
)
from train import pipeline, run
from train.drafts import longspec as objective

Refused = Callable[..., str]
"""As of the fixture of this name."""


def losses(workdir: Path) -> list[float]:
    return [record["loss"] for record in records(workdir) if "loss" in record]


@pytest.mark.full
def test_all_stages_are_one_resumable_run(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Each with its own data and length; the command of a stopped run goes on in its stage."""
    short = write_documents(tmp_path / "short.jsonl", 10)
    long = write_documents(tmp_path / "long.jsonl", 26)
    turns = [{"role": "user", "content": "a tree"}, {"role": "assistant", "content": "a pass"}]
    sft = tmp_path / "sft.jsonl"
    sft.write_text(10 * (json.dumps({"messages": turns}) + "\n"))
    workdir = tmp_path / "run"
    given = [
        f"--config={ROOT}/configs/vicuna7b.py",
        f"--config.target={target}",
        *(f"--config.stages.{name}.batch=8" for name in ("short", "long", "sft")),
        *(f"--config.stages.{name}.accumulation=0" for name in ("short", "long", "sft")),
        f"--config.stages.short.data.files={short}",
        f"--config.stages.long.data.files={long}",
        f"--config.stages.sft.data.files={sft}",
        "--config.stages.short.seq_len=24",
        "--config.stages.long.seq_len=40",
        "--config.stages.long.data.buckets=2",
        "--config.stages.sft.seq_len=40",
        "--config.stages.sft.data.answer_room=16",
        "--config.accept_rows=2",
        "--config.draft.window=7",
        "--config.dtype=float32",
        "--config.mesh.fsdp=2",
        f"--workdir={workdir}",
    ]
    good = sft.read_text()
    sft.write_text(good + "{}\n")
    said = refused(*given)
    assert "line 11 of" in said and "sft.jsonl" in said
    assert "--config.stages.sft.data.max_bad_rows=NUMBER" in said
    assert not (workdir / "checkpoints").exists()  # It would have come hours later.
    sft.write_text(good)
    interrupted(1, monkeypatch, *given)  # Only the long stage has more than one step.
    assert not (workdir / "draft").exists()
    assert command(*given) == 0
    steps = [(record["stage"], record["step"]) for record in records(workdir) if "loss" in record]
    long_steps = [("draft_long", step) for step in range(3)]
    assert steps == [("draft_short", 0), *long_steps, ("draft_sft", 0)]
    assert load_draft(workdir / "draft", load_target(target)[0])


def test_a_run_resumes_exactly_and_exports_what_it_learned(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: Refused,
) -> None:
    files = write_documents(tmp_path / "documents.jsonl", 38)
    exported: dict[str, Any] = {}

    def saving(folder: Path, draft: Any, params: Any, **options: Any) -> None:
        exported[str(folder)] = params
        save_draft(folder, draft, params, **options)

    save_draft = objective.save_draft
    monkeypatch.setattr(objective, "save_draft", saving)
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    # Two of the 38 documents are measured on, the others give four steps an epoch.
    epochs = "--config.stages.short.epochs=2"
    assert command(*arguments(target, files, straight), epochs) == 0
    interrupted(3, monkeypatch, *arguments(target, files, halved), epochs)
    assert "of stage draft_short; the same command resumes it" in capsys.readouterr().err
    assert not (halved / "draft").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    more = write_documents(tmp_path / "more.jsonl", 60)
    changed = ["--config.seed=43", "--config.optimizer.b1=0.8"]
    kept = (halved / "config.json").read_bytes()
    error = refused(*arguments(target, more, halved), epochs, *changed)
    assert (halved / "config.json").read_bytes() == kept
    for words in (
        "--config.seed=43 (was 42)",
        "--config.optimizer.b1=0.8 (was 0.9)",
        "data and tokenizer=",
        "rows to train on=58 (was 36)",
        "restore what changed",
    ):
        assert words in error
    assert command(*arguments(target, files, halved), epochs) == 0

    learned = assert_same_run(straight, halved)
    assert len(learned) == 8
    config, _ = load_target(target)
    draft, params = load_draft(halved / "draft", config)
    assert draft.window == 7 and draft.dtype == "float32"
    jax.tree.map(np.testing.assert_array_equal, params, exported[str(halved / "draft")])

    assert json.loads((halved / "config.json").read_text())["stages"][0]["batch"] == 8

    # The last stage starts from this draft and learns only answers.
    sft = arguments(target, files, tmp_path / "sft", "sft")
    start = f"--config.draft.init={halved / 'draft'}"
    assert command(*sft, start, "--config.stages.sft.steps=1") == 0
    first = next(record for record in records(tmp_path / "sft") if "loss" in record)
    assert first["tokens"] < 8 * 40 / 2 and abs(first["loss"] - learned[-1]) < 1
    before, after = (
        load_draft(folder / "draft", config)[1] for folder in (halved, tmp_path / "sft")
    )
    # The only step of a stage has the floor of the learning rate: it moves a little.
    near = partial(np.testing.assert_allclose, rtol=0, atol=1e-7)
    jax.tree.map(near, after, before)
    moved = jax.tree.map(lambda one, two: bool((one != two).any()), before, after)
    assert any(jax.tree.leaves(moved))


def test_files_of_others_are_never_replaced(target: Path, tmp_path: Path, refused: Refused) -> None:
    """A model's folder has a ``config.json`` too."""
    files = write_documents(tmp_path / "documents.jsonl", 38)
    model = shutil.copytree(target, tmp_path / "model")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[" * 50_000)
    for folder in (model, tmp_path / "broken"):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        error = refused(*arguments(target, files, folder))
        assert f"{folder}/config" in error and "was not written by a training run" in error
        assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_refused_command_leaves_a_finished_run_as_it_was(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Also if only its last stage differs. Local files need no datasets package."""
    for module in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    files = write_documents(tmp_path / "documents.jsonl", 38)
    work = tmp_path / "work"
    given = [*arguments(target, files, work), "--config.stages.short.steps=1"]
    assert command(*given) == 0 and len(losses(work)) == 1
    before = (work / "config.json").read_bytes()
    for change in ("--config.seed=7", "--config.stages.short.learning_rate=1.0"):
        assert f"is of another run: {change}" in refused(*given, change)
        assert (work / "config.json").read_bytes() == before
    assert command(*given, "--config.max_to_keep=7") == 0
    assert json.loads((work / "config.json").read_text())["max_to_keep"] == 7
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(b"")
    for data, module in (
        (["--config.data.files=", "--config.data.hub=owner/name"], "datasets"),
        ([f"--config.data.files={packed}"], "pyarrow"),
    ):
        last = refused(*arguments(target, files, tmp_path / module), *data).splitlines()[-1]
        assert f"packages that are not installed ({module}): pip install" in last


def test_a_training_that_diverges_ends_with_a_sentence_and_what_was_finite(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_documents(tmp_path / "documents.jsonl", 38)
    work = tmp_path / "work"
    given = arguments(target, files, work)
    wild = ["--config.stages.short.learning_rate=1e30", "--config.save_every=1"]
    assert command(*given, *wild) == cli.FAILED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: stage draft_short has diverged: loss=nan")
    assert "at step 1; " in last and "learning_rate" in last
    assert not (work / "draft").exists()
    folders = work / "checkpoints" / "draft_short"
    # The update of step 0 moves everything: far, but to finite numbers.
    assert f"the last finite checkpoint is {folders / '1'};" in last
    assert [path.name for path in folders.iterdir()] == ["1"]
    assert not any("tau_chain" in record for record in records(work))


MISTAKES = {
    "vicuna7b.py:huge": "no variant 'huge'; choose one of all, short",
    "demo.py --config.seed=x": "--config.seed='x' must be a whole",
    "demo.py --wrkdir=x": "--wrkdir; did you mean --workdir?",
    "demo.py x": "unexpected argument 'x'",
    "vicuna7b.py:short --config.data.hub=": "one source of data",
    "demo.py --config.data.files=x": "one source of data",
    "vicuna7b.py --config.target=": "a run needs a target",
    "demo.py --config.dtype=float16": "gradients vanish",
    "vicuna7b.py --config.stages.short.epochs=0": "stage short would never end",
    "vicuna7b.py --config.stages.short.accumulation=3": (
        "batch=2048 rows do not split into accumulation=3"
    ),
    "vicuna7b.py:sft --config.stages.sft.seq_len=1024": (
        "leave nothing of a masked prompt before answer_room=1024"
    ),
}
"""What is typed, and words of the sentence that refuses it."""


@each_row("given", MISTAKES)
def test_a_mistake_is_one_sentence(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(ROOT)
    config, *more = given.split()
    error = refused(f"--config=configs/{config}", *more, f"--workdir={tmp_path / 'work'}")
    assert MISTAKES[given] in error and error.startswith("error: ") and "\n" not in error
    assert not (tmp_path / "work").exists()


def test_a_working_folder_that_cannot_be(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "file").touch()
    workdir = f"--workdir={tmp_path / 'file'}"
    words = "cannot be the folder of a run (File exists); name another"
    assert f"{workdir} {words}" in refused(f"--config={ROOT / 'configs' / 'demo.py'}", workdir)


def test_what_orbax_logs_of_an_error_that_it_raises_is_not_printed(
    tmp_path: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a full disk it logs a traceback from a thread of its own."""

    def full(*_: object) -> None:
        logging.error("Traceback")
        raise ValueError("one sentence")

    monkeypatch.setattr(pipeline, "open_run", full)
    said = refused(f"--config={ROOT / 'configs' / 'demo.py'}", f"--workdir={tmp_path}")
    assert said == "error: one sentence" and "absl" not in {each.name for each in caplog.records}


def test_a_run_that_another_process_writes_is_refused(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "open_run", lambda *_: None)
    with files.alone(tmp_path, "--workdir"):
        said = refused(f"--config={ROOT / 'configs' / 'demo.py'}", f"--workdir={tmp_path}")
    assert "another process is writing this run" in said


def test_data_and_model_that_do_not_fit_are_refused(
    target: Path, tmp_path: Path, refused: Refused
) -> None:
    files = write_documents(tmp_path / "documents.jsonl", 8)
    given = arguments(target, files, tmp_path / "work")
    for change, sentence in {
        "--config.stages.short.seq_len=97": "must be at most the target's max_positions=96",
        "--config.mesh.data=3": "does not spread over mesh data x fsdp = 6",
        "--config.accept_rows=9": "measuring acceptance needs 9 rows of 40 tokens, the data give 8",
        "--config.stages.short.epochs=3": "the data gives 6 rows, a step needs 8",
        f"--config.target={tmp_path}": "config.json",
        "--config.target=a/b/c": "is not a folder",
        "--config.draft.init=runs/absent/draft": "runs/absent/draft is not a folder",
    }.items():
        assert sentence in refused(*given, change)


@pytest.mark.multiproc
def test_the_shell_sees_one_line_and_a_status() -> None:
    said = "error: --config: unknown option 'sed'; did you mean 'seed'?\n"
    given = "-m", "train.run", "--config=configs/demo.py", "--config.sed=1"
    assert ran(*given) == (cli.BAD_INPUT, "", said)


HELP = """
import runpy, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
sys.argv = ["train/run.py", "--help"]
runpy.run_module("train.run", run_name="__main__")
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("missing", ["ml_collections", "absl,orbax"])
def test_without_the_extra_the_shell_sees_what_to_type(missing: str) -> None:
    ended = ran("-c", HELP, missing)
    assert ended.status == cli.BAD_INPUT and not ended.printed
    [sentence] = ended.errors.splitlines()
    names = missing.replace(",", ", ")
    assert sentence.startswith(
        f"error: training needs packages that are not installed ({names}): pip install "
    )


def test_help_names_the_command_and_the_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run.main(["--config=demo", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m train.run --config=NAME")
    assert "small_scale, smollm2, vicuna13b" in text and "--workdir" in text and text.endswith("\n")
