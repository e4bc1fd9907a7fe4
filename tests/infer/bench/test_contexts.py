"""Drafts that read all or a part of a cache, on the demo, through the benchmark."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infer.bench import __main__ as bench
from infer.bench import contexts as bench_contexts
from infer.bench.contexts import MEASURED
from longspec_jax import LongSpec, TreeConfig
from longspec_jax.embedded import DEMO, DRAFTS

pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")


@pytest.mark.parametrize("name", MEASURED)
def test_the_demo_takes_what_is_measured(name: str) -> None:
    method = MEASURED[name]
    spec = LongSpec.demo(draft=DRAFTS[method.draft], draft_options=dict(method.options))
    assert spec.check([[1, 2, 3]], tree=method.tree, max_new_tokens=8)


def test_a_part_of_a_context_changes_no_token(tmp_path: Path, monkeypatch) -> None:
    """With a tree of the same form and fewer passes to compile, and less to read than there is."""
    name, tree = "longspec_retrieval", TreeConfig((3, 3), budget=4, threshold=0.3)
    measured = replace(MEASURED[name], tree=tree, options={"working": 64, "chunk": 8})
    monkeypatch.setitem(MEASURED, name, measured)
    file = tmp_path / "rows.json"
    options = ["--contexts=200", "--documents=2", "--new_tokens=24", "--temperatures=1"]
    assert bench.main(["contexts", *options, f"--methods={name}", f"--json={file}"]) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert (row["method"], row["context"], row["temperature"]) == (name, 200, 1.0)
    assert row["identical_to_plain_fraction"] == 1.0 and row["rows"] == 2
    assert row["acceptance_length"] > 1 and row["tokens_per_second"] > 0
    assert row["tree"] == "3,3@4+0.3" and row["working"] == 64


def test_only_documents_that_are_long_enough_take_part() -> None:
    spec = LongSpec.demo(draft=None)
    rows = bench_contexts.prompts(spec, 8000)
    assert len(rows) == 6 and {len(row) for row in rows} == {8000}
    assert bench_contexts.prompts(spec, 8000, 2) == rows[:2]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--contexts=16000 --new_tokens=64", "the longest of the demo's documents has"),
        ("--contexts=16300 --new_tokens=256", "16556 positions, and the demo was made for 16384"),
        ("--methods=nothing", "--methods: unknown nothing"),
    ],
)
def test_what_cannot_be_measured_is_refused(option: str, words: str, capsys) -> None:
    try:
        status = bench.main(["contexts", *option.split()])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2 and words in capsys.readouterr().err


def test_passes_are_told_apart_by_the_tokens_that_no_draft_proposed() -> None:
    emitted = [False, True, True, False, False, True, False, True]
    assert bench_contexts.confirmed_by_pass(emitted) == [2, 0, 1]
