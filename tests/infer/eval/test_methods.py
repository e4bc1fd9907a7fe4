"""Which methods run with which drafts, how rounds are counted, and what contradicts itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.eval import __main__ as command
from infer.eval.arguments import config_of, method_argument, parser
from infer.eval.config import EvalConfig
from infer.eval.decoders import ready_decoders
from infer.eval.methods import METHODS, Chosen, with_drafts
from infer.eval.records import by_round
from longspec_jax import LongSpec
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.ngram import NgramDraft
from longspec_jax.drafters.streaming import StreamingDraft


@pytest.mark.parametrize(
    ("drafted", "emitted", "accepted"),
    [
        ("0", (), ()),
        ("0000", (1, 1, 1), (0, 0, 0)),
        ("0110100", (3, 2, 1), (2, 1, 0)),
        ("001011", (1, 2, 2), (0, 1, 2)),  # The last round was cut inside the draft.
    ],
)
def test_rounds_end_with_tokens_that_no_draft_proposed(
    drafted: str, emitted: tuple, accepted: tuple
) -> None:
    assert by_round([letter == "1" for letter in drafted]) == (emitted, accepted)


DRAFTS = [NgramDraft(), StreamingDraft()]


def names(*typed: str, drafts: Any = DRAFTS) -> list[str]:
    found = with_drafts([method_argument(text) for text in typed], drafts)
    return [chosen.name for chosen, _ in found]


def test_methods_of_the_drafts_that_are_there() -> None:
    assert names() == ["plain", "magicdec", "ngram"]
    assert names(drafts=[]) == ["plain"]
    assert names("ngram=8,8@6", "ngram", "plain-eager") == [
        *("plain", "plain-eager"),
        *("ngram=8,8@6", "ngram"),
    ]
    assert names("joined", drafts=[StreamingDraft()]) == ["plain", "joined"]
    all_of_them = ["plain", "plain-eager", "magicdec", "ngram", "joined"]
    assert names("all") == all_of_them
    assert names("all", "ngram=8") == [*all_of_them[:4], "ngram=8", "joined"]
    with pytest.raises(ValueError, match="--method=small_lm needs a small_lm draft: .*FOLDER"):
        names("small_lm")
    with pytest.raises(
        ValueError, match="--method=ngram needs --draft=ngram; the run has no draft"
    ):
        names("ngram", drafts=[])
    unknown = NgramDraft()
    object.__setattr__(unknown, "name", "other")
    assert names(drafts=[unknown]) == ["plain", "other"]
    assert names("all", drafts=[unknown]) == ["plain", "plain-eager", "other"]


def test_drafters_of_one_kind_are_measured_apart() -> None:
    with pytest.raises(ValueError, match="two drafts are of the kind ngram"):
        names(drafts=[NgramDraft(), NgramDraft()])


def test_every_method_decodes_with_the_tree_that_it_chooses() -> None:
    """All drafts together, too, among them one that looks up and one without trees for batches."""
    sources = ("demo", "streaming", "ngram")
    typed = ["--task=demo", "--out=never", *(f"--draft={each}" for each in sources), "--method=all"]
    spec = LongSpec.demo(draft=sources)
    decoders = ready_decoders(config_of(typed), spec)
    assert decoders[-2].name == "joined" and len(decoders[-2].spec.drafts) == len(sources)
    for decoder in decoders:
        decoder.spec.check([2, 3], tree=decoder.tree, adaptive=decoder.adaptive)


def test_trees_of_the_methods() -> None:
    streaming = StreamingDraft()
    assert Chosen("plain", "plain").tree(None, cpu=True) == PLAIN
    assert Chosen("magicdec", "magicdec").tree(streaming, cpu=True) == TreeConfig((1,) * 4)
    assert Chosen("ngram", "ngram").tree(NgramDraft(), cpu=False) == TreeConfig((8,) * 16, 64)
    assert Chosen("adaptive", "adaptive").tree(streaming, cpu=True) is None
    assert method_argument("magicdec=chain:2").tree(streaming, cpu=True) == TreeConfig((1, 1))


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--task=nothing"], "--task: 'nothing' must be one of gov_report"),
        (["--task=qmsum", "--method=magic"], "--method: unknown method 'magic'; "),
        (["--task=qmsum", "--method=plain=4"], "plain takes no tree; write --method=plain"),
        (["--task=qmsum", "--method=ngram=none"], "decoding without a tree is --method=plain"),
        (["--task=qmsum", "--task=qmsum"], "--task=qmsum is given twice"),
        (["--task=demo", "--task=demo_docs"], "--task=demo_docs is given twice"),
        (["--task=qmsum", "--method=ngram", "--method=ngram"], "--method=ngram is given twice"),
        (["--task=qmsum", "--top_p=0.9"], "no effect at temperature 0; add --temperature=1"),
        (["--task=jsonl"], "name it with --data=FILE.jsonl"),
        (["--task=jsonl", *[f"--data={__file__}"] * 2], "--data=PATH is given twice"),
        (
            ["--task=lcc", f"--data=lcc={__file__}", f"--data=lcc={__file__}"],
            "--data=lcc is given twice",
        ),
        (["--task=qmsum", "--data=absent.jsonl"], "--data=absent.jsonl: no such file"),
        (["--task=qmsum", f"--data=lcc={__file__}"], "names a task that is not run; add --task="),
        (["--task=qmsum", "--task=lcc", f"--data={__file__}"], "is one file for 2 tasks"),
        (["--task=demo", f"--data={__file__}"], "--data has no effect on --task=demo_code, demo_"),
        (["--task=demo_docs", f"--data=demo_docs={__file__}"], "demo_docs is made of the package"),
        (["--task=needle", "--min_prompt=3"], "--min_prompt has no effect on --task=needle"),
        (["--task=aime24", "--min_prompt=3"], "It is for gov_report, qmsum"),
        (["--task=demo", "--max_prompt=30"], "--max_prompt has no effect on --task=demo_code"),
        (["--task=demo", "--prompt_style=native"], "--prompt_style has no effect"),
        (["--task=lcc", "--context=512"], "It is for pg19, needle, demo_code"),
        (["--task=lcc", "--samples=0"], "--samples: 0 must be"),
    ],
)
def test_what_cannot_be_meant_is_refused(typed: list[str], words: str, tmp_path, capsys) -> None:
    """At once, with exit status 2, and without a folder."""
    folder = tmp_path / "run"
    assert command.main([*typed, f"--out={folder}"]) == 2
    assert words in capsys.readouterr().err and not folder.exists()


def test_defaults() -> None:
    found = config_of(["--task=demo", "--out=x"])
    assert found.tasks == ["demo_code", "demo_docs", "demo_copy", "demo_needle"]
    assert [*found.drafts] == ["demo", "demo_small_lm", "ngram", "streaming"]
    assert (found.temperatures, found.seeds, found.contexts) == ([0.0], [0], [2048])
    other = config_of(["--task=lcc", "--out=x", "--target=y", "--seed=2"])
    assert not other.drafts and other.seeds == [2]
    released = config_of(["--task=lcc", "--out=x", "--target=smollm2"])
    assert [*released.drafts] == ["smollm2-longspec"]


def test_a_configuration_of_python_is_checked_as_a_command_is() -> None:
    with pytest.raises(ValueError, match="--samples=0 must be a whole number from 1"):
        EvalConfig(task=["demo"], out=Path("x"), samples=0)
    with pytest.raises(ValueError, match="--context has no effect on --task=lcc"):
        EvalConfig(task=["lcc"], out=Path("x"), context=[512])
    assert EvalConfig(task=["demo"], out=Path("x")) == replace(
        config_of(["--task=demo", "--out=x"]), command=""
    )


def test_every_method_is_described(capsys) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for name, method in METHODS.items():
        assert f"{name} {method.about}" in printed
