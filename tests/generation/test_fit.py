"""Calls that name no tree run the fastest on the machine: timed once, kept, and never a gamble."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest

from longspec_jax import PLAIN, TreeConfig, make_mesh
from longspec_jax.config import DEFAULT_TREE
from longspec_jax.generation import fit, kept
from longspec_jax.generation.activity import Fitted, Fitting
from longspec_jax.generation.kept import TreePace
from tests.infer.toys import toy_spec

PAIR, FORK, CHAIN = TreeConfig((1, 1)), TreeConfig((2, 2)), TreeConfig((1, 1, 1))
WIDE = TreeConfig((4, 4, 4))
PROMPT = "ab cd gh é"
OPTIONS = dict(max_new_tokens=24, temperature=1.0, seed=3, eos_token_id=[])
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
    fitting = [activity.tree for activity in told if isinstance(activity, Fitting)]
    assert fitting == [PLAIN, PAIR, FORK, CHAIN]
    [settled] = [activity for activity in told if isinstance(activity, Fitted)]
    assert [pace.tree for pace in settled.paces] == fitting
    assert settled.tree == fit.best_tree(settled.paces)
    assert all(pace.seconds > 0 and 1 <= pace.tokens <= 4 for pace in settled.paces)
    assert settled.paces[0].tokens == 1.0
    assert [use.tree for use in first.stats.trees] == [settled.tree]
    assert first.sequences == spec.generate(PROMPT, tree=PLAIN, **OPTIONS).sequences
    [file] = folder.glob("*.json")
    before = file.read_bytes()
    told.clear()
    again = dataclasses.replace(spec).generate(PROMPT, **OPTIONS, on_activity=told.append)
    assert not [activity for activity in told if isinstance(activity, Fitting)]
    assert again.sequences == first.sequences and file.read_bytes() == before
    assert [use.tree for use in again.stats.trees] == [settled.tree]
    # The first call ran what later calls run, in the same shapes: they compile nothing.
    assert spec.generate(PROMPT, **OPTIONS).stats.compile_seconds == 0.0


@pytest.mark.parametrize("best", [PLAIN, FORK, CHAIN])
def test_what_is_kept_decides(folder, spec, best, monkeypatch) -> None:
    paces = [
        TreePace(tree, 1.0 if tree == best else 3.0, 1.5) for tree in (PLAIN, PAIR, FORK, CHAIN)
    ]
    monkeypatch.setattr(fit, "read_paces", lambda *_: tuple(paces))
    result = spec.generate(PROMPT, **OPTIONS)
    assert [use.tree for use in result.stats.trees] == [best]
    compared = spec.compare(PROMPT, **OPTIONS)
    assert compared.identical and (compared.plain is compared.speculative) == (best == PLAIN)
    named = spec.generate(PROMPT, tree=(2,), **OPTIONS)
    assert [use.tree.widths for use in named.stats.trees] == [(2,)]


def test_a_tree_must_clearly_pay() -> None:
    plain = TreePace(PLAIN, 1.0, 1.0)
    assert fit.best_tree([plain, TreePace(CHAIN, 2.0, 2.02)]) == PLAIN
    assert fit.best_tree([plain, TreePace(CHAIN, 2.0, 2.2), TreePace(WIDE, 2.0, 2.1)]) == CHAIN


def test_nothing_is_timed_where_nothing_is_kept(monkeypatch, spec) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", "off")
    told = []
    result = spec.generate(PROMPT, **OPTIONS, on_activity=told.append)
    [settled] = [activity for activity in told if isinstance(activity, Fitted)]
    assert settled == Fitted(CHAIN, ())
    assert [use.tree for use in result.stats.trees] == [CHAIN]


def test_machines_have_their_usual_tree(folder, monkeypatch) -> None:
    small, large = (jax.ShapeDtypeStruct((size,), jnp.bfloat16) for size in (10**6, 10**9))
    assert fit.trees_to_fit(small, None) == fit.trees_to_fit(large, None) == fit.CPU_TREES
    assert fit.trees_to_fit(small, make_mesh()) == (CHAIN,)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert fit.trees_to_fit(small, None) == (WIDE, DEFAULT_TREE)
    assert fit.trees_to_fit(large, None) == (DEFAULT_TREE,)
    monkeypatch.setenv("LONGSPEC_CACHE", "off")
    assert fit.trees_to_fit(small, None) == (DEFAULT_TREE,)


def test_a_prompt_that_ends_at_once_is_not_timed(folder, spec) -> None:
    result = spec.generate(PROMPT, max_new_tokens=1)
    assert result.stats.new_tokens == (1,) and not list(folder.glob("*"))


def test_figures_are_read_as_they_were_written(tmp_path) -> None:
    paces = (TreePace(PLAIN, 0.5, 1.0), TreePace(DEFAULT_TREE, 0.75, 3.5))
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
        lambda text: json.dumps({**json.loads(text), "time": time.time() - 40 * 86400}),
        lambda text: json.dumps({**json.loads(text), "key": {"device": "gpu"}}),
    ],
    ids=["torn", "list", "negative", "text", "field", "old", "other"],
)
def test_damaged_and_old_figures_are_measured_anew(tmp_path, damage) -> None:
    kept.write_paces(tmp_path, KEY, [TreePace(PLAIN, 0.5, 1.0)])
    [file] = tmp_path.glob("*.json")
    file.write_text(damage(file.read_text()))
    assert kept.read_paces(tmp_path, KEY) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    kept.write_paces(tmp_path / "file", KEY, [TreePace(PLAIN, 0.5, 1.0)])
    assert kept.read_paces(tmp_path / "file", KEY) is None
