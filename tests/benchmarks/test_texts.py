"""Texts: prompts of every kind, both ways decoded, and a summary of every row that says so."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.prompts import kinds_of, prompts
from benchmarks.texts import line_of, summarised
from longspec_jax import LongSpec, cli, demo_prompts
from longspec_jax.embedded import DEMO
from longspec_jax.loading import load_tokenizer

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    long, short = folder / "long.py", folder / "short.py"
    long.write_text(next(iter(demo_prompts().values())))
    short.write_text("x = 1\n")
    return [str(long), str(short)]


@pytest.fixture
def model() -> Any:
    """What prompts are read of: a tokenizer with a chat template."""
    tokenizer = load_tokenizer(DEMO / "target")
    tokenizer.chat_template = CHAT
    return SimpleNamespace(tokenizer=tokenizer)


@pytest.mark.slow
def test_every_row_is_a_call_beside_plain_decoding(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = "--context=64 --new_tokens=8 --temperature=0,1 --texts=2 --batch=2 --tree=4,4@6~4"
    options += f" --top_k=1 --draft_option=int8 --tree=none@6~4 --json={out}"
    assert main(["texts", "--files", *files, *options.split()]) == cli.OK
    found = json.loads(out.read_text())
    assert found["header"]["draft"] == ["longspec", "ngram"]
    assert found["header"]["identical_promised"]
    assert found["header"]["draft_options"] == {"int8": True}
    assert [row["tree"] for row in found["rows"]] == ["4,4@6~4", "none@6~4"] * 2
    assert [row["drafter"] for row in found["summary"]] == ["longspec+ngram", "ngram"] * 2
    # Of one token that stays, every draw is greedy.
    alike = [[row[name] for row in found["rows"]] for name in ("tokens_per_round", "texts")]
    assert all(values[:2] == values[2:] for values in alike)
    for row in found["rows"]:
        assert [text["prompt_tokens"] for text in row["texts"]] == [64, 64]
        assert row["new_tokens"] == 16 and row["differing_tokens"] == 0
        assert 1 <= row["tokens_per_round"] <= 5 and row["gain"] > 0
        assert set(row["accepted_by_source"]) <= {"longspec", "ngram", "longspec+ngram"}
    assert set(found["rows"][1]["accepted_by_source"]) <= {"ngram"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context=4096"], "a prompt 4096: give --files with more text, or a smaller --context"),
        (["--text=chat"], "--text chat needs a target with a chat template"),
        (["--temperature=0", "--top_p=0.8"], "--top_p have no effect at temperature 0"),
    ],
)
def test_what_cannot_be_is_refused(
    files: list[str], capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["texts", "--files", files[1], *options]) == cli.BAD_INPUT
    assert words in capsys.readouterr().err


def test_prompts_are_what_they_are_called(model: LongSpec) -> None:
    assert kinds_of(model, (), ()) == ["code", "prose", "chat"]
    assert kinds_of(model, (), [Path("a.py")]) == ["code"]
    decode = model.tokenizer.decode
    for kind in ("code", "prose", "chat"):
        found = prompts(model, kind, 128, 4)
        assert [prompt.seed for prompt in found] == [0, 1, 2, 3]
        assert len({decode(prompt.tokens) for prompt in found}) == 4
        sizes = [len(prompt.tokens) for prompt in found]
        assert sizes == [128] * 4 if kind != "chat" else all(96 < size < 160 for size in sizes)
    assert all(prompt.document.startswith("help(") for prompt in prompts(model, "prose", 64, 2))
    ends = [[one.tokens[-8:].tolist() for one in prompts(model, "code", n, 2)] for n in (16, 96)]
    assert ends[0] == ends[1], "those of other lengths end at the same places"
    assert len({decode(prompt.tokens) for prompt in prompts(model, "prose", 2**14, 40)}) == 40
    [first, second, *_] = found
    assert decode(first.tokens).startswith("<user>Explain what this code does")
    assert decode(second.tokens).startswith("<user>Rename the main names")
    assert decode(second.tokens).endswith("\n```<assistant>")


def call(gain: float, *rounds: float, loops: bool = False, tree: str = "4,4") -> dict[str, Any]:
    texts = [{"tokens_per_round": each, "loops": loops} for each in rounds]
    return {
        "target": "one",
        "text": "code",
        "context": 64,
        "batch": len(rounds),
        "temperature": 0.0,
        "drafter": "ngram",
        "tree": tree,
        "gain": gain,
        "texts": texts,
        "looping": loops * len(rounds),
        "accepted_by_source": {"ngram": 3},
        "plain_tokens_per_second": 10.0,
        "tokens_per_second": 10.0 * gain,
        "round_ms": 1.0,
        "new_tokens": 8 * len(rounds),
        "differing_tokens": 0,
    }


def test_the_summary_has_means_with_intervals_and_keeps_loops_apart() -> None:
    rows = [call(gain, 2 * gain) for gain in (1.0, 2.0, 4.0)] + [call(8.0, 16.0, loops=True)]
    [one, other] = summarised([*rows, call(2.0, 2.0, tree="8")])
    assert (one["gain"], one["gain_other"], one["gain_looping"]) == (2.828, 2.0, 8.0)
    # Of the logarithms to base 2, which are 0 to 3: Student's t of three degrees of freedom, 3.182,
    # times the standard error, 0.6455, is 2.054.
    assert one["gain_low"] == pytest.approx(2 ** (1.5 - 2.054), abs=1e-3)
    assert one["tokens_per_round_high"] == pytest.approx(2 ** (2.5 + 2.054), abs=1e-2)
    assert (one["texts"], one["looping"], one["new_tokens"]) == (4, 1, 32)
    assert one["accepted_by_source"] == {"ngram": 12}
    assert other["gain_low"] is None and other["gain_looping"] is None
    assert "5.66 (1.36 to 23.49) tokens a round" in line_of(one) and "(" not in line_of(other)
