"""Calls that name no tree run the fastest on the machine: timed once, kept, and never a gamble."""

import dataclasses
import itertools
import json
import time

import jax
import jax.numpy as jnp
import pytest

from longspec_jax import PLAIN, TreeConfig, make_mesh
from longspec_jax.config.tree import DEFAULT_TREE
from longspec_jax.decoding.policy import Measurement
from longspec_jax.drafters.draft import is_large
from longspec_jax.drafters.longspec import LongSpecDraft
from longspec_jax.drafters.ngram import NgramDraft
from longspec_jax.generation import autotune, call, models
from longspec_jax.generation import autotune as kept
from longspec_jax.generation import run as run_lib
from longspec_jax.generation.activity import Slower, TreeTiming, Tuned, Tuning
from longspec_jax.generation.autotune import KnownTimings
from longspec_jax.generation.warm import WarmShapes
from tests.infer.toys import bound_draft, toy_spec

PAIR, FORK, CHAIN = TreeConfig((1, 1)), TreeConfig((2, 2)), TreeConfig((1, 1, 1))
WIDE = TreeConfig((4, 4, 4))
FEWER = TreeConfig((2, 2), 4)
PROMPT = "ab cd gh é"
OPTIONS = dict(max_new_tokens=40, temperature=1.0, seed=3, eos_token_id=[])
KEY = {"device": "cpu", "rows": 1}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    return tmp_path / "timings"


CORRECT = KnownTimings.correct


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Timings are short; a busy machine's correct nothing, except where that is tested."""
    monkeypatch.setattr(KnownTimings, "correct", lambda *_: None)
    monkeypatch.setattr(autotune, "SPAN", 0.0)


@pytest.fixture
def spec():
    """The toy, which all tests share, with timings of the test's own."""
    return dataclasses.replace(toy_spec(), tree=None, _timings=KnownTimings())


def test_the_first_call_times_and_later_ones_know(folder, spec) -> None:
    told = []
    first = spec.generate(PROMPT, **OPTIONS, on_activity=told.append)
    timed = [activity.tree for activity in told if isinstance(activity, Tuning)]
    assert timed == 2 * [PLAIN, CHAIN, PAIR, FORK]
    [settled] = [activity for activity in told if isinstance(activity, Tuned)]
    assert [timing.tree for timing in settled.timings] == timed[:4]
    assert settled.tree == kept.best_timing(settled.timings).tree
    assert all(timing.seconds > 0 and 1 <= timing.tokens <= 4 for timing in settled.timings)
    assert settled.timings[0].tokens == 1.0
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
    timings = [
        TreeTiming("longspec" if tree.widths else "plain", tree, 1.0 if tree == best else 3.0, 1.5)
        for tree in (PLAIN, PAIR, FORK, CHAIN)
    ]
    monkeypatch.setattr(KnownTimings, "find", lambda *_: tuple(timings))
    result = spec.generate(PROMPT, **OPTIONS)
    assert [use.tree for use in result.stats.trees] == [best]
    compared = spec.compare(PROMPT, **OPTIONS)
    assert compared.identical and (compared.plain is compared.speculative) == (best == PLAIN)
    named = spec.generate(PROMPT, tree=(2,), **OPTIONS)
    assert [use.tree.widths for use in named.stats.trees] == [(2,)]


def test_a_neighbour_that_slows_all_timings_of_a_tree_does_not_decide(
    folder, spec, monkeypatch
) -> None:
    """Some time later it is timed again, and the fastest counts."""
    timed, times = autotune.time_tree, []

    def disturbed(engine, shared, plan, timings):
        timing, tree = timed(engine, shared, plan, timings), plan.drafter.tree
        seconds = 0.01 if tree == FORK and tree in times else 0.1
        times.append(tree)
        return dataclasses.replace(timing, seconds=seconds)

    monkeypatch.setattr(autotune, "time_tree", disturbed)
    monkeypatch.setattr(KnownTimings, "find", lambda *_: None)
    monkeypatch.setattr(KnownTimings, "keep", lambda *_: None)
    result = spec.generate(PROMPT, **OPTIONS)
    assert times == 2 * [PLAIN, CHAIN, PAIR, FORK]
    assert [use.tree for use in result.stats.trees] == [FORK]


@pytest.mark.parametrize("room", [0, 1], ids=["no room", "too little"])
def test_a_call_that_was_timed_is_not_lost_to_what_later_calls_need(
    folder, spec, monkeypatch, room
) -> None:
    """A second cache is for their prefill: made where it seems to fit, and done without if not."""
    prepare, prepared = WarmShapes.prepare, []

    def prepared_once(warm, plan, streams, on_activity, *, rounds=True) -> float:
        if not rounds:
            return prepare(warm, plan, streams, on_activity, rounds=rounds)
        prepared.append(plan.drafter.tree)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for a second cache")

    needed = spec.check(PROMPT, **OPTIONS)
    beside = needed.needed_bytes + needed.draft_state_bytes + 1
    frees = iter([beside, needed.needed_bytes + room])
    for module in (autotune, run_lib):
        monkeypatch.setattr(module, "free_bytes", lambda: next(frees))
    monkeypatch.setattr(KnownTimings, "find", lambda *_: None)
    monkeypatch.setattr(KnownTimings, "keep", lambda *_: None)
    with monkeypatch.context() as patched:
        patched.setattr(WarmShapes, "prepare", prepared_once)
        result = dataclasses.replace(spec).generate(PROMPT, **OPTIONS)
    assert len(prepared) == room
    assert result.sequences == spec.generate(PROMPT, tree=PLAIN, **OPTIONS).sequences


def test_a_tree_must_clearly_pay() -> None:
    plain = TreeTiming("plain", PLAIN, 1.0, 1.0)
    assert kept.best_timing([plain, TreeTiming("longspec", CHAIN, 2.0, 2.02)]) == plain
    best = TreeTiming("longspec", CHAIN, 2.0, 2.2)
    assert kept.best_timing([plain, best, TreeTiming("ngram", WIDE, 2.0, 2.1)]) == best


def test_nothing_is_timed_where_nothing_is_kept(monkeypatch, spec) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", "off")
    told = []
    result = spec.generate(PROMPT, **OPTIONS, on_activity=told.append)
    [settled] = [activity for activity in told if isinstance(activity, Tuned)]
    assert settled == Tuned("longspec", CHAIN, ())
    assert [use.tree for use in result.stats.trees] == [CHAIN]


def test_machines_have_their_default_tree(folder, monkeypatch) -> None:
    arrays = [jax.ShapeDtypeStruct((size,), jnp.bfloat16) for size in (10**6, 10**9)]
    small, large = map(is_large, arrays)
    defaults = bound_draft(toy_spec()).default_trees
    assert (
        models.trees_to_time(defaults, small, None)
        == models.trees_to_time(defaults, large, None)
        == defaults.cpu
    )
    assert models.trees_to_time(defaults, small, make_mesh()) == (CHAIN,)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    small, large = map(is_large, arrays)
    assert models.trees_to_time(defaults, small, None) == (WIDE, DEFAULT_TREE)
    assert models.trees_to_time(defaults, large, None) == (DEFAULT_TREE,)
    assert models.trees_to_time(defaults, large, None, rows=3) == (DEFAULT_TREE,)
    assert models.trees_to_time(defaults, small, None, rows=4) == (WIDE, DEFAULT_TREE)
    together = models.trees_to_time(defaults, large, None, rows=4)
    assert [tree.num_nodes for tree in together] == [64, 32, 16]
    assert {tree.widths for tree in together} == {DEFAULT_TREE.widths}
    assert models.trees_to_time(defaults, large, make_mesh(), rows=4) == (DEFAULT_TREE,)
    lookup = NgramDraft().default_trees  # Of a kind that says nothing of several rows.
    assert models.trees_to_time(lookup, large, None, rows=32) == lookup.large
    chains = models.trees_to_time(defaults, large, None, sparse=True)
    assert [str(tree) for tree in chains] == ["chain:4", "chain:3", "chain:5"]
    short = dataclasses.replace(defaults, large=(TreeConfig((8, 16, 16)),))
    chains = models.trees_to_time(short, large, None, sparse=True)
    assert [str(tree) for tree in chains] == ["chain:3"]
    monkeypatch.setenv("LONGSPEC_CACHE", "off")
    assert models.trees_to_time(defaults, small, None) == (WIDE,)


def test_a_short_call_is_not_worth_timing(folder, spec) -> None:
    told = []
    result = spec.generate(PROMPT, max_new_tokens=1, on_activity=told.append)
    assert result.stats.new_tokens == (1,) and not list(folder.glob("*"))
    assert Tuned("longspec", CHAIN, ()) in told and not [a for a in told if isinstance(a, Tuning)]


def test_figures_are_read_as_they_were_written(tmp_path) -> None:
    timings = (
        TreeTiming("plain", PLAIN, 0.5, 1.0),
        TreeTiming("longspec", DEFAULT_TREE, 0.75, 3.5),
    )
    kept.write_timings(tmp_path, KEY, timings)
    assert kept.read_timings(tmp_path, KEY) == timings
    assert kept.read_timings(tmp_path, {**KEY, "rows": 2}) is None
    assert kept.read_timings(tmp_path / "absent", KEY) is None


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
    kept.write_timings(tmp_path, KEY, [TreeTiming("plain", PLAIN, 0.5, 1.0)])
    [file] = tmp_path.glob("*.json")
    file.write_text(damage(file.read_text()))
    assert kept.read_timings(tmp_path, KEY) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    kept.write_timings(tmp_path / "file", KEY, [TreeTiming("plain", PLAIN, 0.5, 1.0)])
    assert kept.read_timings(tmp_path / "file", KEY) is None


def test_what_cannot_be_written_is_remembered(tmp_path, monkeypatch) -> None:
    """A home that cannot be written to must not have every call timed again."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path / "file"))
    choices = {("plain", PLAIN), ("longspec", CHAIN)}
    known, timings = (
        KnownTimings(),
        (TreeTiming("plain", PLAIN, 0.5, 1.0), TreeTiming("longspec", CHAIN, 0.7, 2.0)),
    )
    assert known.find(KEY, choices) is None
    known.keep(KEY, timings)
    assert known.find(KEY, choices) == timings
    monkeypatch.setenv("LONGSPEC_CACHE", "off")
    assert known.find(KEY, choices) == timings


@pytest.mark.parametrize("held", [[], [CHAIN], [PLAIN], [PLAIN, CHAIN, WIDE]], ids=str)
def test_figures_of_other_trees_are_none(folder, held) -> None:
    kept.write_timings(folder, KEY, [TreeTiming("ngram", tree, 0.5, 1.0) for tree in held])
    assert KnownTimings().find(KEY, {("ngram", PLAIN), ("ngram", CHAIN)}) is None


def test_figures_of_another_drafter_are_none(folder) -> None:
    kept.write_timings(folder, KEY, [TreeTiming("ngram", CHAIN, 0.5, 1.0)])
    assert KnownTimings().find(KEY, {("longspec", CHAIN)}) is None
    assert KnownTimings().find(KEY, {("ngram", CHAIN)}) is not None


def test_inspect_shows_the_one_tree_that_was_settled_on(folder, spec) -> None:
    expected = spec.generate(PROMPT, **OPTIONS)
    views = list(dataclasses.replace(spec).inspect(PROMPT, **OPTIONS))
    drawn = [depth.drawn for view in views for depth in view.depths]
    assert tuple(drawn)[:39] == expected.sequences[0][1:]


def test_a_useless_draft_is_told_of_by_the_timing(folder, spec) -> None:
    notices = []
    spec._notices._warn = notices.append
    spec._notices.look_at_timings(
        [TreeTiming("plain", PLAIN, 1.0, 1.0), TreeTiming("longspec", CHAIN, 2.0, 1.01)]
    )
    spec._notices.look_at_timings(
        [TreeTiming("plain", PLAIN, 1.0, 1.0), TreeTiming("longspec", CHAIN, 2.0, 2.01)]
    )
    spec._notices.look_at_timings([])
    assert notices == ["at most 0.01 of the draft's tokens were accepted per round"]


def told_trees(spec, prompts, **options) -> tuple[list, list[Tuned]]:
    """The trees that a call timed, and what it settled on."""
    told = []
    spec.generate(prompts, **{**OPTIONS, **options}, on_activity=told.append)
    timed = [activity.tree for activity in told if isinstance(activity, Tuning)]
    return timed, [activity for activity in told if isinstance(activity, Tuned)]


@pytest.fixture
def large(spec, monkeypatch):
    """The toy in the place of a large target on a GPU, with a small tree and a budget of it."""
    defaults = dataclasses.replace(
        bound_draft(spec).default_trees, large=(FORK,), together=(FORK, FEWER)
    )
    monkeypatch.setattr(models, "is_large", lambda params: True)
    monkeypatch.setattr(LongSpecDraft, "default_trees", defaults)
    return spec


def test_several_rows_of_a_large_target_choose_a_budget(folder, large) -> None:
    """Once for a power of two of rows and of context; three rows run the default tree untimed."""
    rows = [PROMPT, PROMPT * 2, PROMPT, "ab"]
    settled = [Tuned("longspec", FORK, ())]
    assert told_trees(large, rows[:3], max_new_tokens=90) == ([], settled)
    # Three choices of thirty-two rounds each are 96: a call of fewer tokens is not spent on them.
    assert told_trees(large, rows, max_new_tokens=95) == ([], settled)
    assert not list(folder.glob("*.json"))
    timed, [first] = told_trees(large, rows, max_new_tokens=96)
    assert timed == 2 * [PLAIN, FORK, FEWER]
    assert [timing.tree for timing in first.timings] == timed[:3]
    assert first.tree == kept.best_timing(first.timings).tree
    [file] = folder.glob("*.json")
    kept_key = json.loads(file.read_text())["key"]
    assert (kept_key["rows"], kept_key["context"]) == (4, 512)
    # What is known serves every later call of the kind, and short ones too.
    again = dataclasses.replace(large)
    assert told_trees(again, [*rows[1:], "cd"], max_new_tokens=5) == ([], [first])
    assert list(folder.glob("*.json")) == [file]


def test_rows_that_wait_for_a_slot_are_not_decoded_together(folder, large) -> None:
    few = dataclasses.replace(large, row_slots=3)
    for spec, trees in ((few, [FORK]), (large, [FORK, FEWER])):
        drafters, _ = models.drafters_for(spec, None, 5, adaptive=False)
        assert [drafter.tree for drafter in drafters] == trees


@pytest.mark.parametrize("streams", [False, True], ids=["at once", "streamed"])
def test_timing_takes_no_second_cache_and_leaves_the_first_as_it_was(
    folder, spec, monkeypatch, streams
) -> None:
    """Of many rows two would not fit: with room for one and a draft state everything is timed."""
    rows = [PROMPT]  # Of the shapes of the other tests.
    needed = spec.check(PROMPT, **OPTIONS)
    free = needed.needed_bytes + needed.draft_state_bytes
    for module in (autotune, run_lib):
        monkeypatch.setattr(module, "free_bytes", lambda: free)
    assert told_trees(spec, rows)[0] == []
    for module in (autotune, run_lib):
        monkeypatch.setattr(module, "free_bytes", lambda: free + 1)
    told, copied, copy = [], [], jnp.copy
    options = {**OPTIONS, "on_activity": told.append}
    monkeypatch.setattr("jax.numpy.copy", lambda leaf: copied.append(leaf.shape) or copy(leaf))
    if streams:
        added = [round_.tokens for round_ in spec.stream(rows, **options)]
        found = [tuple(itertools.chain(*row)) for row in zip(*added, strict=True)]
    else:
        found = spec.generate(rows, **options).sequences
    timed = [activity.tree for activity in told if isinstance(activity, Tuning)]
    assert timed == 2 * [PLAIN, CHAIN, PAIR, FORK]
    assert copied and not [shape for shape in copied if needed.capacity in shape]
    assert [*found] == [*spec.generate(rows, tree=PLAIN, **OPTIONS).sequences]


PLAINLY = TreeTiming("plain", PLAIN, 1.0, 1.0, 30)


@pytest.mark.parametrize("row_slots", [None, 1], ids=["slots for all", "one slot"])
def test_timing_behind_prompts_that_are_prefilled_alone(folder, monkeypatch, row_slots) -> None:
    """With one slot a single prompt is prefilled for it, of the sizes of chunks of two."""
    rows, options = [[3] * 9, [6] * 200], dict(OPTIONS, max_new_tokens=100)
    defaults = dataclasses.replace(bound_draft(toy_spec()).default_trees, cpu=(CHAIN, PAIR))
    monkeypatch.setattr(LongSpecDraft, "default_trees", defaults)
    known = {"_timings": KnownTimings(), "_warm": WarmShapes()}
    spec = dataclasses.replace(toy_spec(max_positions=1024), tree=None, prefill_chunk=512)
    plain = spec.generate(rows, tree=PLAIN, **options)
    monkeypatch.setattr(call, "has_same_bits", lambda target: True)
    spec, told = dataclasses.replace(spec, row_slots=row_slots, **known), []
    found = spec.generate(rows, **options, on_activity=told.append)
    assert found.sequences == plain.sequences
    assert any(isinstance(activity, Tuning) for activity in told)


def test_a_run_corrects_what_was_kept(folder) -> None:
    """Its rounds count more than those of the timing, and the better tree is another one then."""
    known = KnownTimings()
    known.keep(KEY, [PLAINLY, TreeTiming("longspec", CHAIN, 1.0, 3.0, 30)])
    seen = Measurement(rounds=60, row_rounds=60, tokens=90, seconds=75.0)
    assert CORRECT(known, KEY, "longspec", CHAIN, seen) is None
    [plain, chain] = kept.read_timings(folder, KEY)
    assert plain == PLAINLY
    assert chain.seconds == pytest.approx((30 * 1.0 + 60 * 1.25) / 90)
    assert chain.tokens == pytest.approx((30 * 3.0 + 60 * 1.5) / 90) and chain.rounds == 90
    for few in (Measurement(), Measurement(15, 15, 15, 99.0)):
        assert CORRECT(known, KEY, "longspec", CHAIN, few) is None
    assert kept.read_timings(folder, KEY) == (plain, chain)


def test_a_run_slower_than_plain_decoding_has_all_trees_timed_again(folder) -> None:
    known = KnownTimings()
    timings = PLAINLY, TreeTiming("longspec", CHAIN, 1.0, 3.0, 30)
    known.keep(KEY, timings)
    slow = Measurement(rounds=40, row_rounds=40, tokens=80, seconds=100.0)
    assert CORRECT(known, KEY, "longspec", CHAIN, slow) == pytest.approx(0.8)
    assert kept.read_timings(folder, KEY) is None
    assert known.find(KEY, {("plain", PLAIN), ("longspec", CHAIN)}) is None
    assert CORRECT(known, KEY, "longspec", CHAIN, slow) is None, "nothing is kept"


def test_a_call_that_was_slower_says_so_and_the_next_one_times_again(
    folder, spec, monkeypatch
) -> None:
    told = []
    options = {**OPTIONS, "on_activity": told.append, "max_new_tokens": 120}
    spec.generate(PROMPT, **options)
    [file] = folder.glob("*.json")
    # From here on: by the clock alone the run above may have been the slower one.
    monkeypatch.setattr(KnownTimings, "correct", CORRECT)
    whole = json.loads(file.read_text())
    for timing in whole["timings"]:
        # Plain decoding seems a thousand times as fast as it is, a tree twice as fast as that.
        timing["seconds"] = 1e-6 if not timing["tree"]["widths"] else 1e-6 * timing["tokens"] / 2
    file.write_text(json.dumps(whole))
    told.clear()
    again = dataclasses.replace(spec, _timings=KnownTimings())
    again.generate(PROMPT, **options)
    [slower] = [activity for activity in told if isinstance(activity, Slower)]
    assert 0 < slower.speed < 0.5 and slower.tree.widths and not file.exists()
    told.clear()
    again.generate(PROMPT, **options)
    assert [activity for activity in told if isinstance(activity, Tuning)]
