"""The arguments of the decode command: all that is refused without a model, and in which words."""

import json
from pathlib import Path

import pytest

import longspec_jax
from infer import arguments, decode
from longspec_jax.checks import Maybe, Truth
from longspec_jax.config.loading import OPTIONS as LOADING
from longspec_jax.config.sampling import NUMBERS, OPTIONS
from longspec_jax.config.tree import DEFAULT_TREE, PLAIN, TreeConfig
from longspec_jax.embedded import DEMO
from tests.kit import each_row
from tests.refusals import wrong_text

MODELS = ["--target=models/target", "--draft=models/draft"]
WHOLE = "must be a whole number"
REFUSED = {
    # Numbers, as they were typed.
    **{
        f"--{name}={text}": f"--{name}: "
        for name, declared in {**{name: OPTIONS[name] for name in NUMBERS}, **LOADING}.items()
        if declared.rule != Truth() and declared.rule != Maybe(Truth())
        for text in wrong_text(declared.rule)
    },
    "--max_new_tokens=1e9": f"--max_new_tokens: '1e9' {WHOLE}",
    "--max_new_tokens=1_000": f"--max_new_tokens: '1_000' {WHOLE}",
    "--max_new_tokens=" + "9" * 5000: f"--max_new_tokens: '{'9' * 79}... {WHOLE}",
    "--seed=4294967296": f"--seed: 4294967296 {WHOLE} from 0 to 4294967295",
    "--top_p=half": "--top_p: 'half' must be a number, in (0, 1]",
    "--attention=": "--attention: '' must be one of pallas, mosaic",
    "--mesh=4": "--mesh: '4' must be sizes of the axes data, fsdp, tp, such as tp=2",
    "--mesh=tp=0": "--mesh: 'tp=0' must be sizes of the axes",
    "--mesh=tp=2,tp=2": "each axis once",
    "--draft_option=": "--draft_option: the value is empty",
    # Trees.
    "--tree=4,4@0": "--tree: a tree budget counts the root and must be whole "
    "and at least 1 node, got 0",
    "--tree=4,4@1": "--tree: the tree 4,4@1 verifies only the root, which the target "
    "knows already; use the tree none",
    **{
        f"--tree={text}": f"--tree: '{text}' must be the widths of a tree"
        for text in ("4,,5", "wide", "")
    },
    "--tree=chain:9999": "has 10000 nodes",
    "--tree=0": "--tree: tree widths must be positive, got (0,)",
    "--tree=" + "9" * 5000: "--tree: '999",
    "--tree=" + ",".join("1" * 200): "level",
    "--tree=4,4@99": "--tree: @99 is more nodes than the tree 4,4 has: 9 with its root; write",
    # Empty values.
    **{
        f"{option}=": f"{option}: the value is empty; leave the option out"
        for option in (
            *("--messages", "--json", "--batch", "--prompt_file", "--target", "--draft"),
        )
    },
    "--prompt=": "--prompt: the prompt is empty",
    # Unknown things.
    "--attention=mosiac --target=a/b": "interpret; did you mean mosaic?",
    "--temprature=1": "unknown option --temprature; did you mean --temperature?",
    "--temp=1": "unknown option --temp",
    "stray": "unexpected argument 'stray'",
    "--seed": "--seed: expected one argument",
    # Contradictions.
    "--prompt=a --batch=b": "--batch: not allowed with argument --prompt",
    "--all_prompts --prompt=a": "--prompt: not allowed with argument --all_prompts",
    "--draft=folder": "--draft folder needs the --target it was made for",
    "--draft=ngrma": "a draft works with no other (did you mean ngram?)",
    "--revision=main": "--revision chooses a version on the hub, and no --target of "
    "the hub is named",
    "--target=demo --revision=main": "--revision chooses a version on the hub, and no --target",
    "--target=a/b --draft_revision=x": "--draft_revision chooses a version on the hub, and no "
    "--draft",
    f"--target={DEMO / 'target'} --revision=main": "is a folder; drop one of the two",
    "--tree=none --adaptive": "--adaptive has nothing to choose with --tree none",
    "--tree=none --draft_option=int8": "--draft_option is about a draft, and --tree none has",
    "--draft=ngram --draft=ngram": "--draft ngram is named twice",
    "--target=a/b --draft=demo": "--draft demo is the demo's own draft, and --target is a/b",
    "--draft=ngram --draft_revision=x": "--draft_revision chooses a version on the hub, and",
    "--tree=none --compare": "--compare needs a draft to compare, and --tree none has none",
    **{
        f"--target=a/b {option}": f"{option.split('=')[0]} is about a draft's trees, and no "
        "--draft is"
        for option in ("--tree=9,9", "--tree=chain:3", "--adaptive")
    },
    "--target=a/b --draft_option=int8": "--draft_option is about a draft, and no --draft is",
    "--target=a/b --compare": "--compare needs a draft to compare, and no --draft is named",
    "--top_k=5": "--top_k 5 filters what is drawn, and --temperature 0 draws nothing",
    "--top_p=0.5": "--top_p 0.5 filters what is drawn, and --temperature 0 draws nothing",
    "--top_k=5 --temperature=0": "--top_k 5 filters what is drawn",
    "--prompt_file=- --prompt_file=-": "--prompt_file -: standard input can be read once",
    # Files.
    "--batch=absent --stream": "--stream shows one prompt as it is completed, and --batch "
    "has several",
    "--prompt_file=absent": "--prompt_file: absent cannot be read: No such file",
    "--messages=absent": "--messages: absent cannot be read: No such file",
    "--messages=[{]": "--messages is not valid JSON",
    '--messages=[{"role":"user","content":1}]': "--messages: message 0: the content must be text",
    "--batch=absent": "--batch: absent cannot be read: No such file",
    "--json=/dev/full": "--json: /dev/full is a device and no file",
    "--json=/": "--json: / is a folder",
    "--json=absent/out.json": "--json: absent/out.json: its folder does not exist",
    f"--json={__file__}/x.json": "its folder does not exist; make it first",
    f"--prompt_file={__file__} --json={__file__}": "is there and holds no results",
    f"--json={__file__}": f"--json: {__file__} is there and holds no results",
    "--batch=/dev/zero": "--batch: /dev/zero holds more than 268 MB",
    **{
        f"{option}=~nobody_here/x": f"{option}: ~nobody_here/x: there is no home folder"
        for option in ("--prompt_file", "--target", "--draft", "--json")
    },
    "--draft_option=int8 --draft_option=int8=false": "--draft_option int8 is given twice",
}


@each_row("typed", REFUSED)
def test_refused_on_one_line_before_anything(typed, capsys) -> None:
    """Without loading jax, only on standard error."""
    assert decode.main(typed.split(" ")) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("error: ") and REFUSED[typed] in line and not printed.out
    assert len(line) < 400 + len(typed)


@each_row("raw", ["a\udcff", "\ud800"])
def test_a_prompt_that_is_no_text(raw, capsys) -> None:
    """As Python hands on bytes of an argument that are not UTF-8."""
    assert decode.main([f"--prompt={raw}"]) == 2
    assert "error: --prompt is not UTF-8 text: character" in capsys.readouterr().err


@each_row(
    ("rows", "options", "message"),
    [
        ([{"prompt": "a", "top_k": 5}], [], "batch.jsonl, line 1: top_k 5 filters what is drawn"),
        (["a", {"prompt": "b", "top_p": 0.5}], [], "batch.jsonl, line 2: top_p 0.5 filters"),
        ([{"prompt": "a", "top_k": 5, "temperature": 0}], ["--temperature=1"], "line 1: top_k 5"),
        (
            ["a"],
            ["--top_k=5"],
            "--top_k 5 filters what is drawn, and --temperature 0 draws nothing",
        ),
    ],
)
def test_filters_of_rows_that_draw_nothing(tmp_path, rows, options, message, capsys) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert decode.main([f"--batch={path}", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_row_takes_the_filters_only_where_it_draws(tmp_path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text('"a"\n{"prompt": "b", "temperature": 1, "seed": 4}')
    found = parsed(f"--batch={path}", "--top_k=5", "--seed=3", "--ignore_eos")
    rows = arguments.named_prompts(found)
    arguments.check_filters(found, rows)
    first, second = (arguments.row_options(found, row) for row in rows)
    assert (first["top_k"], first["seed"]) == (0, 3) and first["eos_token_id"] == []
    assert (second["top_k"], second["seed"], second["temperature"]) == (5, 4, 1.0)


ACCEPTED = (
    *("", "--target=demo", "--target=demo --draft=folder", "--tree=none", "--tree=chain:4"),
    *("--top_k=0 --top_p=1", "--top_k=5 --temperature=0.7", "--seed=4294967295 --temperature=1"),
    *("--tree=1,1,1@2", "--target=a/b", "--target=a/b --draft=c/d --revision=main"),
    *("--target=a/b --tree=none", "--target=a/b --draft=c/d --tree=none", "--no-compare"),
    *("--adaptive --tree=chain:4", "--no-stream --prompt=a", "--target=a/b --no-compare"),
)


@each_row("typed", ACCEPTED)
def test_what_is_no_contradiction(typed) -> None:
    found = parsed(*typed.split())
    arguments.check(arguments.models_of(found), compare=bool(found.compare))


def parsed(*typed: str):
    return arguments.parser().parse_args(typed)


def test_the_tree() -> None:
    """What is not named, the library chooses."""
    assert parsed().tree is None
    assert parsed("--tree=none").tree == PLAIN
    assert parsed("--tree=4,5").tree == TreeConfig((4, 5))
    assert parsed("--tree=4,16,16,16,16@64").tree == DEFAULT_TREE
    assert parsed("--tree=chain:2").tree == TreeConfig((1, 1))


def test_home_in_every_path(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert parsed("--json=-").json == Path("-")
    for option in ("target", "messages", "batch"):
        typed = [f"--{option}=~/x"]
        expected = "~/x" if option == "messages" else "/home/someone/x"
        assert getattr(parsed(*typed), option) == expected
    for option in ("prompt_file", "draft"):
        assert getattr(parsed(f"--{option}=~/x"), option) == ["/home/someone/x"]


@each_row("columns", ["1", "20"])
def test_help_in_a_narrow_terminal(columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert "--draft_option" in arguments.parser().format_help()


def test_version(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        decode.main(["--version"])
    assert capsys.readouterr().out == f"longspec_jax {longspec_jax.__version__}\n"
