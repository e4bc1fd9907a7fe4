"""What the benchmarks are asked for: quick to parse, refused in a line before anything runs."""

from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import arguments as bench_arguments
from benchmarks import decode as bench_decode
from benchmarks import models as bench_models
from benchmarks.attention import CANDIDATES
from longspec_jax.cli import ByMachine, settled
from longspec_jax.config.names import ATTENTION
from longspec_jax.config.tree import DEFAULT_TREE, TreeConfig
from longspec_jax.ops.attention.dispatch import PREFIX, SPECULATIVE, TREE
from tests.kit import each_row

ROOT = Path(__file__).parents[2]
BAD = {
    "--shape: 'foo' must be one of tiny, demo, vicuna7b": "decode --shape=foo",
    "did you mean vicuna7b?": "decode --shape=vicuna",
    "--context: 'x' must be a whole number": "decode --context=x",
    "--context: 2147483648 must": "decode --context=4096 --context=2147483648",
    "--tree: a tree budget counts the root and must be whole": "decode --tree=2,2@0",
    "--tree: @9 is more nodes than the tree 2,2 has: 5": "decode --tree=2,2@9",
    "--tree: none drafts nothing, and plain decoding is measured with": "decode --tree=none",
    "--tree: +0.7 chooses among the levels below the first": "decode --tree=4+0.7",
    "--draft_option: working=33 must be a multiple of 32": (
        "decode --shape=tiny --draft=small_lm --draft_option=working=33"
    ),
    "unknown option --budget": "decode --budget=8",
    "unknown option --contxt; did you mean --context?": "decode --contxt=4096",
    "--new_tokens: 1 must be a whole number from 2": "decode --new_tokens=1",
    "--turns: 0 must": "decode --turns=0",
    "--length: 0 must": "train --length=0",
    "--mesh: 'dp=2' must be sizes of the axes data, fsdp, tp": "train --mesh=dp=2",
    "--prefill: chunks of 4096 tokens are longer": "decode --context=4096 --context=1024 "
    "--prefill=4096",
    "--tree: tree widths must be positive": "decode --tree=4,0",
    "--acceptance: nan must be >= 0 and finite": "decode --acceptance=nan",
    "--acceptance: a round of tree 3 emits 1 to 2 tokens": "decode --tree=3 --acceptance=9",
    "--draft_option: vocabulary=513 must be 1 to 512, the tokens of the target": (
        "decode --shape=tiny --draft_option=vocabulary=513"
    ),
    "--draft_option: unknown option 'int8' for ngram": (
        "decode --shape=tiny --draft=ngram --draft_option=int8"
    ),
    "--draft_option: recent='many' must be a whole number": (
        "decode --shape=tiny --draft=streaming --draft_option=recent=many"
    ),
    "--draft_option: dtype='int8' must be one of float32": (
        "decode --shape=tiny --draft=small_lm --draft_option=dtype=int8"
    ),
    "--attention: 'magic' must be one of pallas": "decode --attention=magic",
    "--heads: '32' must be query heads and": "attention --heads=32",
    "--heads: '3/2' must be query heads and": "attention --heads=32/8 --heads=3/2",
    "--dtype: 'int3' must be one of float32": "attention --dtype=int3",
    "--implementation: 'nothing' must be one of ours": "attention --implementation=nothing",
    "--rows: 'many' must": "products --rows=many",
    "--json: /nowhere/x.json: its folder does not exist": "decode --json=/nowhere/x.json",
    "--json: '-' must be the name of a file": "decode --json=-",
    f"--json: {__file__} is there and holds no results": f"decode --json={__file__}",
    "required: attention|decode": "",
    "invalid choice: 'fly'": "fly",
}


@each_row("words", BAD)
def test_bad_input_is_one_line_before_anything_runs(
    words: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("decode", "attention", "products"):
        monkeypatch.setattr(f"benchmarks.{module}.measure_roofline", lambda: pytest.fail("it ran"))
    status = bench.main(BAD[words].split())
    printed = capsys.readouterr()
    assert status == 2 and not printed.out
    [line] = printed.err.splitlines()
    assert line.startswith("error: ") and words in line


def test_defaults_depend_on_the_machine_and_what_is_named_stands() -> None:
    parser = bench_arguments.parser()
    parsed = parser.parse_args(["decode", "--context=77"])
    here, there = settled(parsed, cpu=True), settled(parsed, cpu=False)
    assert here.context == there.context == [77]
    assert (here.shape, there.shape) == (["demo"], ["vicuna7b"])
    assert there.tree[0].num_nodes == 64 and here.tree[0].num_nodes < 8
    required = {"texts": ["--files=a.py"]}
    for name in bench_arguments.BENCHMARKS:
        arguments = parser.parse_args([name, *required.get(name, [])])
        for cpu in (True, False):
            values = vars(settled(arguments, cpu)).values()
            assert not any(isinstance(value, ByMachine) for value in values)


def test_the_trees_are_those_that_are_named_or_the_default() -> None:
    def trees(*more: str) -> list[TreeConfig]:
        parsed = bench_arguments.parser().parse_args(["decode", *more])
        return [each.tree for each in bench_decode.all_settings(settled(parsed, cpu=False))]

    assert trees() == [DEFAULT_TREE] and DEFAULT_TREE.num_nodes == 64
    several = trees("--tree=4,16,16,16,16@16", "--tree=4,16,16,16,16", "--tree=chain:4@4")
    assert [tree.num_nodes for tree in several] == [16, 69, 4]


def test_the_names_that_are_known_without_jax_are_those_there_are() -> None:
    for op in (PREFIX, TREE, SPECULATIVE):
        assert op.implementations.keys() == set(ATTENTION)
    assert bench_arguments.ATTENTION_CANDIDATES == (*CANDIDATES,)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(bench_models, "free_bytes", lambda: 10**9)
    assert bench.main(["decode", "--shape=demo", "--context=1000", "--context=1000000"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "demo with 1000000 cached tokens takes 8." in printed.err
    assert "1.00 GB are free on the device; choose a shorter context" in printed.err


def test_a_failure_while_running_is_a_line_and_a_traceback_if_wanted(monkeypatch, capsys) -> None:
    def fail() -> None:
        raise AssertionError("first\nsecond")

    monkeypatch.setattr("benchmarks.products.measure_roofline", fail)
    assert bench.main(["products", "--shape=tiny"]) == 1
    assert capsys.readouterr().err.endswith("failed while running: AssertionError: first\n")
    assert bench.main(["products", "--shape=tiny", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err
