"""The parts of a ``LongSpec`` are refused in words, before anything is read."""

import copy
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from longspec_jax import PLAIN, LongSpec, TreeConfig
from longspec_jax.arguments import ARGUMENTS, as_tree, check_gap, refuse_pickling
from longspec_jax.checks import Refused, Truth, Whole, check
from longspec_jax.config.loading import OPTIONS as LOADING
from longspec_jax.drafters.draft import Draft, Target
from longspec_jax.drafters.registry import SMALL_LM, options_of
from longspec_jax.embedded import DRAFTS
from longspec_jax.loading import choose_drafts
from tests.infer.toys import rebound, toy_spec, toy_tokenizer
from tests.kit import each_row, tiny_target_config
from tests.refusals import wrong

OTHER_MESH = Mesh(np.asarray(jax.devices()[:1]), ("model",))
BAD: dict[str, list[Any]] = {
    "tokenizer": ["x", "", 3, Path("x"), {}, type(toy_tokenizer())],
    "mesh": [4, "tp=2", (1, 1, 2), True, OTHER_MESH],
    **{name: wrong(LOADING[name].rule) for name in ("attention", "max_num_seqs", "offload")},
    "batch_invariant": wrong(LOADING["batch_invariant"].rule),
    "prefill_chunk": wrong(Whole()),
}
BAD_TO_LOAD: dict[str, list[Any]] = {
    **BAD,
    **{name: wrong(option.rule) for name, option in LOADING.items()},
    "target": [None, "", 3, b"x", ["x"], "x" * 5000, "a\0b"],
    "draft": ["", 3, False, b"x", [], ["ngram", 3]],
    "draft_options": ["int8", 3, ["int8"], True, {5: 1}],
}
BAD_TO_CALL: dict[str, list[Any]] = {
    "streamer": [object(), 3, "stdout", print],
    "on_round": [5, "print", [print]],
    "on_activity": [5, "print", [print]],
    **dict.fromkeys(("adaptive", "output_scores", "output_logits", "return_trees"), wrong(Truth())),
}


def made(**parts: Any) -> LongSpec:
    return LongSpec(tiny_target_config(), None, **parts)


@each_row("name", BAD)
def test_parts_that_are_none(name) -> None:
    for value in BAD[name]:
        with pytest.raises(Refused, match=f"^{name}=.* must be "):
            made(**{name: value})


@each_row("name", BAD_TO_LOAD)
def test_arguments_that_are_none(name) -> None:
    """Nothing of these names exists: they are refused before anything is looked for."""
    for value in BAD_TO_LOAD[name]:
        with pytest.raises(Refused, match=f"^{name}=.* must be "):
            LongSpec.from_pretrained(**{"target": "no/target", "draft": "no/draft", name: value})
        if name not in ("target", "draft"):
            with pytest.raises(Refused, match=f"^{name}=.* must be "):
                LongSpec.demo(**{name: value})


@each_row("name", BAD_TO_CALL)
def test_arguments_of_a_call_that_are_none(name) -> None:
    for value in BAD_TO_CALL[name]:
        with pytest.raises(Refused, match=f"^{name}=.* must be "):
            check(ARGUMENTS, **{name: value})


def test_arguments_of_a_call_that_are_fine() -> None:
    class Streamer:
        put = end = print

    check(ARGUMENTS, streamer=Streamer(), on_round=print, on_activity=None, adaptive=True)
    check(ARGUMENTS, streamer=None, on_round=None, on_activity=[].append, adaptive=False)


@each_row(
    ("arguments", "message"),
    [
        ((3, 1, 2), "^tokens=3 must be the token ids of one row"),
        (("ab", 1, 2), "^tokens='ab' must be the token ids of one row"),
        (([1], 1, 2), r"^tokens=\[1\] must be the token ids of one row, .* at least 2"),
        (([[1, 2], [3]], 1, 2), r"^tokens=\[1, 2\] must be a whole number from 0 to 16"),
        (([1, 17], 1, 2), "^tokens=17 must be a whole number from 0 to 16"),
        (([1, 2], "a", 2), "^plain='a' must be a whole number from 0 to 16"),
        (([1, 2], 1, -1), "^other=-1 must be a whole number from 0 to 16"),
        (([1, 2], 1, None), "^other=None must be a whole number"),
    ],
)
def test_tokens_of_a_gap(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_gap(*arguments, vocab_size=17)
    assert check_gap(np.asarray([1, 16]), np.int64(0), 16, vocab_size=17) == [1, 16]


def test_a_model_is_not_pickled() -> None:
    class Model:
        __getstate__ = refuse_pickling

    for way in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="a Model cannot be pickled or copied.*load it again"):
            way(Model())


@each_row("tree", ["4*16", "", 5, True, 4.0, {4}, {"4": 1}, [2.5], ["4"], [True], [None]])
def test_trees_that_are_none(tree) -> None:
    with pytest.raises(ValueError, match="tree"):
        as_tree(tree)
    with pytest.raises(ValueError, match="tree"):
        made(tree=tree)
    with pytest.raises(ValueError, match="tree"):
        LongSpec.from_pretrained("no/target", tree=tree)


def test_trees() -> None:
    assert as_tree((2, 3)) == as_tree([2, 3]) == as_tree(TreeConfig((2, 3)))
    assert hash(as_tree([2, 3])) == hash(TreeConfig((2, 3)))
    assert made().tree is None
    assert made(tree=()).tree == made(tree=PLAIN).tree == PLAIN
    assert made(tree=[4, 5]).tree == made(tree="4,5").tree == TreeConfig((4, 5))
    assert made(tree="none").tree == PLAIN and as_tree("4,5@7") == TreeConfig((4, 5), 7)


def test_the_empty_tree_of_a_loaded_pair_is_plain_decoding(monkeypatch) -> None:
    """It is no absent one."""
    monkeypatch.setattr("longspec_jax.api.as_tree", lambda tree: pytest.fail(str(tree)))
    with pytest.raises(pytest.fail.Exception, match=r"\(\)"):
        LongSpec.demo(tree=())


@each_row("chunk", [2049, 10**9])
def test_a_prefill_step_no_prompt_can_fill(chunk) -> None:
    with pytest.raises(ValueError, match=f"^prefill_chunk={chunk} is longer .*pass at most 2048$"):
        made(prefill_chunk=chunk)
    made(prefill_chunk=2048)
    LongSpec(tiny_target_config(max_positions=4096), None, prefill_chunk=4096)


@each_row("config", [None, {}, "demo", 3])
def test_configs_that_are_none(config) -> None:
    with pytest.raises(ValueError, match="^target_config=.* must be a TargetConfig"):
        LongSpec(config, None)
    if config is not None:
        with pytest.raises(ValueError, match="^draft=.* must be a loaded draft"):
            made(draft=config)


@each_row("tokens", [True, "x", 0, [], [0.5], [True], [[1]]])
def test_a_draft_vocabulary_is_a_list_of_tokens(tokens) -> None:
    with pytest.raises(ValueError, match="a draft vocabulary is a list of token ids"):
        rebound(toy_spec(), vocabulary=tokens)


OPTIONS = [
    ("demo", {"int4": True}, r"unknown option 'int4' for .*; did you mean 'int8'\?"),
    ("demo", {"int8": 1}, "int8=1 must be True or False"),
    ("demo", {"int8": "yes"}, "int8='yes' must be True or False"),
    ("demo", {"vocabulary": True}, "vocabulary=True must be a whole number"),
    ("demo", {"vocabulary": 2.5}, "vocabulary=2.5 must be a whole number"),
    ("demo", {"vocabulary": "x"}, "vocabulary='x' must be a whole number"),
    ("demo_small_lm", {"dtype": 3}, "dtype=3 must be text, or left out"),
    ("demo_small_lm", {"context": 0}, "context=0 must be at least 1"),
    ("ngram", {"int8": True}, "unknown option 'int8' for ngram; it has retrieve"),
    ("streaming", {"recent": 2.5}, "recent=2.5 must be a whole number"),
    ("streaming", {"recent": None}, "recent=None must be a whole number"),
    ("streaming", {"recent": 0}, "sinks=32 must be at least 0 and recent=0 at least 1"),
    ("streaming", {"sinks": -1}, "sinks=-1 must be a whole number from 0"),
    ("streaming", {"retrieve": 7}, "retrieve=7: 7 slots"),
    ("streaming", {"name": "other"}, "unknown option 'name' for streaming; it has sinks, recent, "),
    (["demo", "ngram"], {"folded": True}, "unknown option 'folded' for .*; it has"),
]


@each_row(("draft", "options", "message"), OPTIONS)
def test_options_of_a_draft_are_checked_before_weights_are_read(
    draft, options, message, monkeypatch
) -> None:
    monkeypatch.setattr(
        "longspec_jax.api.load_with_tokenizer", lambda *_, **__: pytest.fail("read")
    )
    with pytest.raises(ValueError, match=f"^draft_options: {message}"):
        LongSpec.demo(draft=draft, draft_options=options)


def test_a_folder_of_a_draft_that_is_missing(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        LongSpec.demo(draft=tmp_path / "missing")


def test_the_demo_takes_the_names_that_the_command_takes(monkeypatch) -> None:
    named = []
    monkeypatch.setattr(LongSpec, "from_pretrained", lambda _, draft, **__: named.append(draft))
    for draft in ("demo", ["demo_small_lm", "ngram"], ("demo",), None, 3):
        LongSpec.demo(draft=draft)
    LongSpec.demo()
    small, own = DRAFTS["demo_small_lm"], DRAFTS["demo"]
    assert named == [own, [small, "ngram"], [own], None, 3, own]


def test_what_is_left_out_of_a_drafts_options_has_its_default() -> None:
    assert options_of(SMALL_LM, {"context": 8, "dtype": None}, "no/draft").context == 8


def test_drafts_without_weights_are_named() -> None:
    [chosen] = choose_drafts(["ngram"], {})
    draft = chosen.load(Target(tiny_target_config(), None))
    assert draft.name == "ngram" and isinstance(draft, Draft)
    assert made(draft=draft).drafts == (draft,)
    with pytest.raises(ValueError, match="two of the kind ngram"):
        made(draft=[draft, draft])
    for named in ((), ("ngram",)):
        with pytest.raises(ValueError, match="draft_revision='v1' is the version of a draft"):
            LongSpec.from_pretrained("no/target", *named, draft_revision="v1")


def test_a_call_is_checked_before_anything_runs() -> None:
    spec = toy_spec()
    with pytest.raises(ValueError, match="^streamer=.* must be a transformers streamer"):
        spec.generate("a", streamer=object())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="a prompt of 8193 characters cannot fit"):
        spec.check("a" * 8193)
    for call in (spec.generate, spec.compare):
        with pytest.raises(ValueError, match="^on_round=5 must be a function"):
            call("a", on_round=5)
    for call in (spec.generate, spec.stream, spec.compare):
        with pytest.raises(ValueError, match="^on_activity=5 must be a function"):
            call("a", on_activity=5)
        with pytest.raises(ValueError, match="^adaptive='yes' must be True or False"):
            call("a", adaptive="yes")
    with pytest.raises(ValueError, match="^plain=17 must be a whole number from 0 to 16"):
        spec.score_gap([3, 4], 17, 3)
    with pytest.raises(ValueError, match="^tokens=3 must be the token ids of one row"):
        spec.score_gap(3, 1, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="a LongSpec cannot be pickled or copied"):
        pickle.dumps(spec)
