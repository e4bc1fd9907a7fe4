"""Calls that name no tree run the fastest on the machine: timed once, kept, and never a gamble."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest

from longspec_jax import PLAIN, TreeConfig, make_mesh
from longspec_jax.config import DEFAULT_TREE
from longspec_jax.generation import autotune
from longspec_jax.generation import paces as kept
from longspec_jax.generation.activity import Tuned, Tuning
from longspec_jax.generation.paces import KnownPaces, TreePace
from tests.infer.toys import bound_draft, toy_spec

PAIR, FORK, CHAIN = TreeConfig((1, 1)), TreeConfig((2, 2)), TreeConfig((1, 1, 1))
WIDE = TreeConfig((4, 4, 4))
PROMPT = "ab cd gh é"
OPTIONS = dict(max_new_tokens=40, temperature=1.0, seed=3, eos_token_id=[])
KEY = {"device": "cpu", "rows": 1}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    return tmp_path / "paces"


@pytest.fixture
def spec():
    return dataclasses.replace(toy_spec(), tree=None)


def test_the_first_call_times_and_later_ones_know(folder, spec) -> None:
    told = []
    first = spec.generate(PROMPT, **OPTIONS, on_activity=told.append)
    timed = [activity.tree for activity in told if isinstance(activity, Tuning)]
    assert timed == [PLAIN, CHAIN, PAIR, FORK]
    [settled] = [activity for activity in told if isinstance(activity, Tuned)]
    assert [pace.tree for pace in settled.paces] == timed
    assert settled.tree == autotune.best_pace(settled.paces).tree
    assert all(pace.seconds > 0 and 1 <= pace.tokens <= 4 for pace in settled.paces)
    assert settled.paces[0].tokens == 1.0
    assert [use.tree for use in first.stats.trees] == [settled.tree]
    assert first.sequences == spec.generate(PROMPT, tree=PLAIN, **OPTIONS).sequences
    [file] = folder.glob("*.json")
    before = file.read_bytes()
    told.clear()
    again = dataclasses.replace(spec).generate(PROMPT, **OPTIONS, on_activity=told.append)
    assert not [activity for activity in told if isinstance(activity, Tuning)]
    assert again.sequences == first.sequences and file.read_bytes() == before
    assert [use.tree for use in again.stats.trees] == [settled.tree]
    # The first call ran what later calls run, in the same shapes: they compile nothing.
    assert spec.generate(PROMPT, **OPTIONS).stats.compile_seconds == 0.0


@pytest.mark.parametrize("best", [PLAIN, FORK, CHAIN])
def test_what_is_kept_decides(folder, spec, best, monkeypatch) -> None:
    paces = [
        TreePace("longspec" if tree.widths else "plain", tree, 1.0 if tree == best else 3.0, 1.5)
        for tree in (PLAIN, PAIR, FORK, CHAIN)
    ]
    monkeypatch.setattr(KnownPaces, "find", lambda *_: tuple(paces))
    result = spec.generate(PROMPT, **OPTIONS)
    assert [use.tree for use in result.stats.trees] == [best]
    compared = spec.compare(PROMPT, **OPTIONS)
    assert compared.identical and (compared.plain is compared.speculative) == (best == PLAIN)
    named = spec.generate(PROMPT, tree=(2,), **OPTIONS)
    assert [use.tree.widths for use in named.stats.trees] == [(2,)]


def test_a_tree_must_clearly_pay() -> None:
    plain = TreePace("plain", PLAIN, 1.0, 1.0)
    assert autotune.best_pace([plain, TreePace("longspec", CHAIN, 2.0, 2.02)]) == plain
    best = TreePace("longspec", CHAIN, 2.0, 2.2)
    assert autotune.best_pace([plain, best, TreePace("ngram", WIDE, 2.0, 2.1)]) == best


def test_nothing_is_timed_where_nothing_is_kept(monkeypatch, spec) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", "off")
    told = []
    result = spec.generate(PROMPT, **OPTIONS, on_activity=told.append)
    [settled] = [activity for activity in told if isinstance(activity, Tuned)]
    assert settled == Tuned("longspec", CHAIN, ())
    assert [use.tree for use in result.stats.trees] == [CHAIN]


def test_machines_have_their_usual_tree(folder, monkeypatch) -> None:
    small, large = (jax.ShapeDtypeStruct((size,), jnp.bfloat16) for size in (10**6, 10**9))
    usual = bound_draft(toy_spec()).usual
    assert (
        autotune.trees_to_time(usual, small, None)
        == autotune.trees_to_time(usual, large, None)
        == usual.cpu
    )
    assert autotune.trees_to_time(usual, small, make_mesh()) == (CHAIN,)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert autotune.trees_to_time(usual, small, None) == (WIDE, DEFAULT_TREE)
    assert autotune.trees_to_time(usual, large, None) == (DEFAULT_TREE,)
    monkeypatch.setenv("LONGSPEC_CACHE", "off")
    assert autotune.trees_to_time(usual, small, None) == (WIDE,)


def test_a_short_call_is_not_worth_timing(folder, spec) -> None:
    told = []
    result = spec.generate(PROMPT, max_new_tokens=1, on_activity=told.append)
    assert result.stats.new_tokens == (1,) and not list(folder.glob("*"))
    assert Tuned("longspec", CHAIN, ()) in told and not [a for a in told if isinstance(a, Tuning)]


def test_figures_are_read_as_they_were_written(tmp_path) -> None:
    paces = (TreePace("plain", PLAIN, 0.5, 1.0), TreePace("longspec", DEFAULT_TREE, 0.75, 3.5))
    kept.write_paces(tmp_path, KEY, paces)
    assert kept.read_paces(tmp_path, KEY) == paces
    assert kept.read_paces(tmp_path, {**KEY, "rows": 2}) is None
    assert kept.read_paces(tmp_path / "absent", KEY) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: text.replace('"seconds": 0.5', '"seconds": -1'),
        lambda text: text.replace('"seconds": 0.5', '"seconds": "x"'),
        lambda text: text.replace('"widths"', '"width"'),
        lambda text: text.replace('"tokens": 1.0', '"tokens": 99'),
        lambda text: json.dumps({**json.loads(text), "time": time.time() - 40 * 86400}),
        lambda text: json.dumps({**json.loads(text), "key": {"device": "gpu"}}),
    ],
    ids=["torn", "list", "negative", "text", "field", "many", "old", "other"],
)
def test_damaged_and_old_figures_are_measured_anew(tmp_path, damage) -> None:
    kept.write_paces(tmp_path, KEY, [TreePace("plain", PLAIN, 0.5, 1.0)])
    [file] = tmp_path.glob("*.json")
    file.write_text(damage(file.read_text()))
    assert kept.read_paces(tmp_path, KEY) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    kept.write_paces(tmp_path / "file", KEY, [TreePace("plain", PLAIN, 0.5, 1.0)])
    assert kept.read_paces(tmp_path / "file", KEY) is None


def test_what_cannot_be_written_is_remembered(tmp_path) -> None:
    """A home that cannot be written to must not have every call timed again."""
    (tmp_path / "file").write_text("")
    choices = {("plain", PLAIN), ("longspec", CHAIN)}
    known, paces = (
        KnownPaces(),
        (TreePace("plain", PLAIN, 0.5, 1.0), TreePace("longspec", CHAIN, 0.7, 2.0)),
    )
    assert known.find(KEY, choices, tmp_path / "file") is None
    known.keep(KEY, paces, tmp_path / "file")
    assert known.find(KEY, choices, tmp_path / "file") == paces
    assert known.find(KEY, choices, None) == paces


@pytest.mark.parametrize("held", [[], [CHAIN], [PLAIN], [PLAIN, CHAIN, WIDE]], ids=str)
def test_figures_of_other_trees_are_none(tmp_path, held) -> None:
    kept.write_paces(tmp_path, KEY, [TreePace("ngram", tree, 0.5, 1.0) for tree in held])
    assert KnownPaces().find(KEY, {("ngram", PLAIN), ("ngram", CHAIN)}, tmp_path) is None


def test_figures_of_another_drafter_are_none(tmp_path) -> None:
    kept.write_paces(tmp_path, KEY, [TreePace("ngram", CHAIN, 0.5, 1.0)])
    assert KnownPaces().find(KEY, {("longspec", CHAIN)}, tmp_path) is None
    assert KnownPaces().find(KEY, {("ngram", CHAIN)}, tmp_path) is not None


def test_inspect_shows_the_one_tree_that_was_settled_on(folder, spec) -> None:
    expected = spec.generate(PROMPT, **OPTIONS)
    views = list(dataclasses.replace(spec).inspect(PROMPT, **OPTIONS))
    drawn = [depth.drawn for view in views for depth in view.depths]
    assert tuple(drawn)[:39] == expected.sequences[0][1:]


def test_a_useless_draft_is_told_of_by_the_timing(folder, spec) -> None:
    notices = []
    spec._notices._warn = notices.append
    spec._notices.look_at_paces(
        [TreePace("plain", PLAIN, 1.0, 1.0), TreePace("longspec", CHAIN, 2.0, 1.01)]
    )
    spec._notices.look_at_paces(
        [TreePace("plain", PLAIN, 1.0, 1.0), TreePace("longspec", CHAIN, 2.0, 2.01)]
    )
    spec._notices.look_at_paces([])
    assert notices == ["at most 0.01 of the draft's tokens were accepted per round"]
