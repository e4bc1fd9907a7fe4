"""A whole run on toy models: counts, identity, continuing, and what Ctrl-C keeps."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from infer.eval import __main__ as command
from infer.eval import run as run_lib
from infer.eval.arguments import config_of
from infer.eval.decoders import Decoder
from infer.eval.records import SAMPLES, Run, SampleRecord, acceptance_length, read
from longspec_jax import files
from tests.infer.toys import save_toy, toy_spec

NEW = 24
GREEDY = "--temperature=0"
PAIRS = "--temperature=1", "--samples=2", "--batch=2"
PROMPTS = ["ab cd gh \u00e9", "gh ab cd ab cd ab", "h"]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("toy")
    target, draft = save_toy(folder)
    data = folder / "prompts.jsonl"
    rows = ({"id": f"p{n}", "prompt": text} for n, text in enumerate(PROMPTS))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("--task=jsonl", f"--data={data}", f"--target={target}", f"--draft={draft}"),
        *("--method=longspec-tree=4,5", f"--max_new_tokens={NEW}", "--prefill_chunk=32"),
        "--seed=7",
    ]


@pytest.fixture(scope="module")
def made(options: list[str], tmp_path_factory) -> Path:
    """A run with everything that can be asked for, two rows together, at temperature 1."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert command.main([*options, *PAIRS, f"--out={folder}"]) == 0
    return folder


def by_method(run: Run, method: str) -> list[SampleRecord]:
    return [record for record in run.samples if record.method == method]


def test_every_count_is_kept(made: Path) -> None:
    run = read(made)
    assert len(run.samples) == 2 * 2 and not run.skipped
    for record in run.samples:
        assert len(record.tokens) == record.new_tokens <= NEW
        assert record.target_passes == len(record.emitted_by_round)
        assert sum(record.emitted_by_round) == record.new_tokens - 1
        assert record.ended == ("eos" if record.tokens[-1] == 0 else "length")
        assert (record.new_tokens == NEW) or record.ended == "eos"
        assert record.batch == 2 and record.seed == 7
        assert record.prefill_s > 0
    for record in by_method(run, "plain"):
        assert set(record.emitted_by_round) <= {1} and record.identical_to_plain is None
    speculative = by_method(run, "longspec-tree=4,5")
    assert all(record.identical_to_plain for record in speculative)
    assert acceptance_length(speculative) > 1 == acceptance_length(by_method(run, "plain"))
    assert run.header.methods["longspec-tree=4,5"].tree == "4,5"
    assert run.header.provenance["versions"]["jax"] and "infer.eval" in run.header.command


def test_a_killed_run_is_continued(options: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    """After some calls, in the middle of a line: nothing is lost, and nothing counted twice."""
    calls: list[str] = []
    decode = Decoder.decode

    def counted(self: Decoder, *arguments):
        if len(calls) == 3:
            raise RuntimeError("killed")
        calls.append(self.name)
        return decode(self, *arguments)

    greedy = [*options, GREEDY, f"--out={tmp_path}"]
    monkeypatch.setattr(Decoder, "decode", counted)
    assert command.main(greedy) == 1
    path = tmp_path / SAMPLES
    data = path.read_bytes()
    assert data.count(b"\n") == 3
    path.write_bytes(data[:-20])
    calls.clear()
    monkeypatch.setattr(Decoder, "decode", decode)
    capsys.readouterr()
    assert command.main(greedy) == 0
    said = capsys.readouterr()
    assert "was cut short; its sample is measured again" in said.err
    assert "2 results of earlier starts" in said.err and "\x1b" not in said.out + said.err
    run = read(tmp_path)
    assert len(run.samples) == 2 * len(PROMPTS) and len(run.header.continued) == 1
    assert [record.start for record in run.samples] == [0, 0, 1, 1, 1, 1]
    assert "plain timed in another start of this run" in said.out
    assert all(record.identical_to_plain for record in by_method(run, "longspec-tree=4,5"))
    assert data[:-20].rpartition(b"\n")[0] in path.read_bytes()
    assert command.main(greedy) == 0 and read(tmp_path).samples == run.samples
    assert command.main([*greedy, "--batch=3"]) == 2
    assert "holds a run with other options (batch: 1 there, 3 now)" in capsys.readouterr().err
    # What lies under the same names is another draft, a target of other matrices, other prompts.
    data, *models = (Path(options[place].partition("=")[2]) for place in (1, 2, 3))
    target, draft = (folder / "model.safetensors" for folder in models)
    whole = {path: path.read_bytes() for path in (data, target, draft)}
    data.write_bytes(whole[data].replace(b"ab", b"ba"))
    for path, least in ((target, 2), (draft, 1)):
        tensors = load_file(path)
        save_file({name: each + (each.ndim >= least) for name, each in tensors.items()}, path)
    try:
        assert command.main(greedy) == 2
    finally:
        for path, content in whole.items():
            path.write_bytes(content)
    said = capsys.readouterr().err
    changed = "prompts", "matrices of the target", "draft longspec"
    assert "; ".join(f"{name}: changed under the same name" for name in changed) in said


def test_a_call_of_several_rows_that_was_kept_in_part_is_not_counted_twice(
    options: list[str], made: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(made, tmp_path / "cut")
    given = [*options, *PAIRS, f"--out={folder}"]
    path, whole = folder / SAMPLES, read(folder)
    path.write_bytes(path.read_bytes()[:-20])
    assert command.main(given) == 0
    again = read(folder)
    assert [record.key for record in again.samples] == [record.key for record in whole.samples]
    assert command.main(given) == 0, "what is there can still be read"


def test_of_several_runs_the_one_of_median_seconds_is_kept(
    options: list[str], tmp_path, monkeypatch
) -> None:
    decode, seconds = Decoder.decode, iter([3.0, 1.0, 2.0] * 2)

    def timed(self: Decoder, *arguments):
        found = decode(self, *arguments)
        stats = dataclasses.replace(found.stats, decode_seconds=next(seconds))
        return dataclasses.replace(found, stats=stats)

    monkeypatch.setattr(Decoder, "decode", timed)
    more = ["--samples=1", "--repetitions=3", f"--out={tmp_path}"]
    assert command.main([*options, GREEDY, *more]) == 0
    assert [record.decode_s for record in read(tmp_path).samples] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("mine", "holds other files and no run; name an empty or new folder"),
        ("file", "file cannot be the folder of a run (File exists); name another"),
        ("file/run", "/run cannot be the folder of a run (Not a directory)"),
        ("", "--out: the value is empty"),
    ],
)
def test_what_can_be_no_folder_of_a_run_is_refused(
    options: list[str], tmp_path: Path, monkeypatch, capsys, out: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("mine/notes.txt", "file"):
        (tmp_path / name).write_text("x")
    assert command.main([*options, f"--out={out}"]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == (tmp_path / "mine/notes.txt").read_text() == "x"


def test_a_run_that_another_process_writes_is_refused(options: list[str], tmp_path, capsys) -> None:
    """Its samples would be in the file twice."""
    with files.alone(tmp_path, "--out"):
        assert command.main([*options, f"--out={tmp_path}"]) == 2
    assert "another process is writing this run" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_python_measures_what_the_command_does(options: list[str], made: Path) -> None:
    """The run of the command is complete, so that nothing is measured again."""
    before = read(made)
    config = config_of([*options, *PAIRS, f"--out={made}"])
    again = run_lib.evaluate(config)
    assert again.samples == before.samples
    assert len(again.header.continued) == len(before.header.continued) + 1
    with pytest.raises(ValueError, match="holds a run with other options .*batch: 2 there, 1 now"):
        run_lib.evaluate(dataclasses.replace(config, batch=1))


def test_another_text_is_told_with_its_gap(options: list[str], tmp_path, monkeypatch) -> None:
    """The draft's run has another second token, and plain decoding's scores are compared there."""
    decode = Decoder.decode

    def changed(self: Decoder, *arguments):
        found = decode(self, *arguments)
        if self.name == "plain":
            return found
        row, same = found.sequences
        tokens = (row[0], row[1] % 5 + 6, *row[2:])
        assert tokens != row
        return dataclasses.replace(found, sequences=(tokens, same))

    monkeypatch.setattr(Decoder, "decode", changed)
    assert command.main([*options, *PAIRS, f"--out={tmp_path}"]) == 0
    plain, _, other, same = read(tmp_path).samples
    assert (
        same.identical_to_plain
        and other.identical_to_plain is False
        and other.divergence is not None
    )
    assert other.divergence.index == 1 and other.divergence.gap is not None
    assert other.divergence.gap > 0
    prompt = toy_spec().tokenizer(PROMPTS[0])["input_ids"]
    again = toy_spec().score_gap(
        *([*prompt, plain.tokens[0]], plain.tokens[1], other.tokens[1]), temperature=1.0, seed=7
    )
    assert other.divergence.gap == pytest.approx(again, rel=1e-4)


def test_ctrl_c_keeps_what_has_ended(options: list[str], tmp_path, monkeypatch, capsys) -> None:
    calls: list[str] = []
    keep = run_lib.EvalRun._keep

    def interrupted(self, records) -> None:
        keep(self, records)
        calls.append("kept")
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_lib.EvalRun, "_keep", interrupted)
    ended: list[int] = []
    assert command.main([*options, GREEDY, f"--out={tmp_path}"], ended.append) == 130 and ended == [
        130
    ]
    assert "keeps the results so far (2)" in capsys.readouterr().err
    assert len(read(tmp_path).samples) == 2
