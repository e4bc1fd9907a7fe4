"""Calls that name no tree: what they may run, what they learn of it, and what a machine keeps."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax import PLAIN, TreeConfig, make_mesh
from longspec_jax.config.tree import DEFAULT_TREE
from longspec_jax.decoding.chooser import Measurement
from longspec_jax.decoding.warmup import RoundTimes
from longspec_jax.drafters.base import NoDraft
from longspec_jax.drafters.draft import is_large
from longspec_jax.drafters.longspec import LongSpecDraft
from longspec_jax.drafters.ngram import NgramDraft
from longspec_jax.generation import candidates, models
from longspec_jax.generation.activity import TreeTiming, Tuned
from longspec_jax.generation.call import plan_call
from longspec_jax.generation.inputs import read_batch
from longspec_jax.generation.speeds import KnownSpeeds, begun_with, kept_speeds, settle
from longspec_jax.generation.warm import WarmShapes
from longspec_jax.loading import with_lookup
from tests.infer.toys import bound_draft, toy_spec
from tests.lookup import LookupDrafter

PAIR, FORK, CHAIN = TreeConfig((1, 1)), TreeConfig((2, 2)), TreeConfig((1, 1, 1))
WIDE, HALF = TreeConfig((4, 4, 4)), TreeConfig((4, 8, 8, 8, 8), 32)
FEWER = TreeConfig((2, 2), 4)
PROMPT = "ab cd gh é"
OPTIONS: dict[str, Any] = dict(max_new_tokens=40, temperature=1.0, seed=3, eos_token_id=[])
KIND = "a kind of call"
PLAINLY = TreeTiming("plain", PLAIN, 1.0, 1.0, 30)
DRAFTERS = NoDraft(), LookupDrafter(CHAIN), LookupDrafter(FORK)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def spec():
    """The toy, which all tests share, with knowledge of the test's own."""
    return dataclasses.replace(toy_spec(), tree=None, _speeds=KnownSpeeds())


def told(spec, prompts: Any = PROMPT, **options) -> tuple[Any, list[Tuned]]:
    """The result of a call, and its reports of what it begins with."""
    found: list[Any] = []
    result = spec.generate(prompts, **{**OPTIONS, **options}, on_activity=found.append)
    return result, [activity for activity in found if isinstance(activity, Tuned)]


def test_a_first_call_chooses_as_it_runs_and_later_ones_know(folder, spec) -> None:
    first, begun = told(spec)
    assert begun == [Tuned("longspec", CHAIN, ())]
    assert [use.tree for use in first.stats.trees] == [PLAIN, CHAIN]
    assert sum(use.tokens for use in first.stats.trees) == 39
    plain = spec.generate(PROMPT, tree=PLAIN, **OPTIONS)
    assert first.sequences == plain.sequences
    again, [known] = told(spec)
    assert again.sequences == plain.sequences and again.stats.compile_seconds == 0.0
    assert {timing.tree for timing in known.timings} <= {PLAIN, CHAIN} and known.timings
    # Another process finds it in the file.
    elsewhere, [kept] = told(dataclasses.replace(spec, _speeds=KnownSpeeds()))
    assert kept.timings and elsewhere.sequences == plain.sequences
    assert [path.name for path in folder.glob("*.json")] == ["speeds.json"]


def test_nothing_is_kept_where_nothing_may_be(monkeypatch, spec) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", "off")
    told(spec)
    _, [known] = told(spec)
    assert known.timings, "this process knows"
    _, [other] = told(dataclasses.replace(spec, _speeds=KnownSpeeds()))
    assert not other.timings


def test_a_short_call_has_one_candidate(spec) -> None:
    result, begun = told(spec, max_new_tokens=8)
    assert [use.tree for use in result.stats.trees] == [CHAIN] == [each.tree for each in begun]


def test_candidates_are_compiled_and_timed_before_rows_wait_for_slots(spec) -> None:
    few = dataclasses.replace(spec, max_num_seqs=1, _warm=WarmShapes())
    few.generate([PROMPT, PROMPT], **OPTIONS)
    assert [len(times.seconds) for times in few._warm._times.values()] == [2]


def test_a_cache_that_is_moved_costs_the_same_under_every_tree(spec) -> None:
    offloaded = dataclasses.replace(spec, offload=True)
    drafters, _ = candidates.drafters_for(offloaded, None, 1, adaptive=False)
    assert [drafter.tree for drafter in drafters] == [CHAIN]


def test_inspect_and_breakdown_run_one_tree(spec) -> None:
    expected = spec.generate(PROMPT, **OPTIONS)
    drawn = [depth.drawn for view in spec.inspect(PROMPT, **OPTIONS) for depth in view.depths]
    assert tuple(drawn)[:39] == expected.sequences[0][1:]


def planned(spec, **options):
    given: Any = {**OPTIONS, **options}
    batch = read_batch(spec, PROMPT, None, given)
    return plan_call(spec, batch)


def test_where_the_clock_could_change_text_it_chooses_before_the_call(spec) -> None:
    """The first call of a kind tries its candidates; the others run the fastest to their end."""
    plan, speeds = planned(spec), spec._speeds
    settled = settle(plan, speeds, streams=False, identical=False)
    assert len(settled.plan.drafters) == 2 and settled.kind is not None
    seen = Measurement(20, 20, 20, 20.0), Measurement(20, 20, 30, 90.0)
    spec._speeds.learn(settled.kind, settled.plan.drafters, seen)
    [only] = settle(plan, speeds, streams=False, identical=False).plan.drafters
    assert only.tree == PLAIN
    assert len(settle(plan, speeds, streams=False, identical=True).plan.drafters) == 2
    fixed = settle(plan, speeds, streams=False, identical=True, fixed=True)
    assert [drafter.tree for drafter in fixed.plan.drafters] == [PLAIN]


def test_a_policy_begins_with_what_is_known(spec) -> None:
    plan, speeds = planned(spec), spec._speeds
    settled = settle(plan, speeds, streams=False, identical=True)
    assert settled.policy(RoundTimes((1.0,))) is None
    assert settle(plan, speeds, streams=False, identical=True).plan is settled.plan, "made once"
    policy = settled.policy(RoundTimes((1e-3, 1.5e-3)))
    assert policy is not None and policy.choose().candidate == 1, "a tree that nobody has seen"
    seen = Measurement(20, 20, 20, 20.0), Measurement(20, 20, 60, 30.0)
    spec._speeds.learn(settled.kind, settled.plan.drafters, seen)
    policy = settle(plan, speeds, streams=False, identical=True).policy(RoundTimes((1e-3, 1.5e-3)))
    assert policy is not None and policy.choose().candidate == 1 and policy.choose().rounds > 2
    policy = settle(plan, speeds, streams=False, identical=True).policy(RoundTimes((1e-3, 9e-3)))
    assert policy is not None and policy.choose().candidate == 0, "at this context it does not pay"


# Nobody trained the toy's draft, and the call may begin with it.
@pytest.mark.filterwarnings("ignore:at most 0")
def test_lookup_alone_weighs_its_trees_by_the_seconds_of_the_warm_up(spec) -> None:
    joined = dataclasses.replace(spec, draft=with_lookup(spec.drafts))
    plan = planned(joined)
    settled = settle(plan, spec._speeds, streams=False, identical=True)
    assert [str(each.tree) for each in settled.plan.drafters] == ["none", "chain:3@8~7", "none@8~7"]
    assert settled.plan.signature != plan.signature
    times = RoundTimes((1.0, 2.5, 1.5), unverified=(1.0, 2.5, 1.125))
    warm, ready = settled.plan, settled.weighing(times)
    assert np.asarray(warm.params.costs).tolist() == [1.0, 0.0], "the warm-up runs whole trees"
    assert np.asarray(ready.params.costs).tolist() == [1.125, 1.5]
    # What has not run is guessed: of three levels two tokens, and 2.6 of a chain with lookup,
    # whose rounds take 2.4 plain ones of SmolLM2 on two processors.
    rows = (2.7, 1.125, 2), (1.2, 1.125, 1), (2.7, 1.25, 0), (2.4, 1.125, 1), (2.4, 1.25, 1)
    for model, unverified, first in rows:
        times = RoundTimes((1.0, model, 1.5), unverified=(1.0, model, unverified))
        policy: Any = settled.policy(times)
        assert policy.leader == first
    for options in ({"identical": False}, {"identical": True, "fixed": True}):
        other = settle(plan, spec._speeds, streams=False, **options)
        assert (
            other.plan.params.costs is None and other.weighing(RoundTimes((1.0, 1.0))) is other.plan
        )
    result, [begun] = told(joined)
    assert result.sequences == spec.generate(PROMPT, tree=PLAIN, **OPTIONS).sequences
    assert begun.tree in [use.tree for use in result.stats.trees]


def test_a_tree_of_lookup_is_that_of_drafts_that_only_look_up(spec) -> None:
    alone = dataclasses.replace(spec, draft=(NgramDraft(),))
    result = alone.generate(PROMPT, tree="none@6~5", **OPTIONS)
    assert [str(use.tree) for use in result.stats.trees] == ["8,8,8,8,8@6"]
    with pytest.raises(ValueError, match="none@9~4"):
        alone.generate(PROMPT, tree="2,2@9~4", **OPTIONS)


def test_a_tree_must_clearly_pay() -> None:
    def begun(*known: TreeTiming) -> TreeConfig:
        return DRAFTERS[begun_with(DRAFTERS, known, CHAIN)].tree

    assert begun() == CHAIN
    assert begun(PLAINLY, TreeTiming("lookup", CHAIN, 2.0, 2.02, 9)) == PLAIN
    chain = TreeTiming("lookup", CHAIN, 2.0, 2.2, 9)
    assert begun(PLAINLY, chain) == begun(chain) == CHAIN
    assert begun(PLAINLY, chain, TreeTiming("lookup", FORK, 1.0, 2.2, 9)) == FORK
    assert begun(PLAINLY, TreeTiming("ngram", WIDE, 0.1, 3.0, 9)) == PLAIN, "no candidate"


def test_what_earlier_processes_found_slow_is_not_compiled_again() -> None:
    before = KnownSpeeds()
    seen = [Measurement(9, 9, 9, 9.0), Measurement(9, 9, 27, 9.0), Measurement(9, 9, 9, 20.0)]
    before.learn(KIND, DRAFTERS, seen)
    assert before.candidates(KIND, DRAFTERS) == DRAFTERS, "the same ones for a whole process"
    assert KnownSpeeds().candidates(KIND, DRAFTERS) == DRAFTERS[:2], "plain decoding stays"
    few = "another kind"
    before.learn(few, DRAFTERS, [Measurement(2, 2, each.tokens, each.seconds) for each in seen])
    assert KnownSpeeds().candidates(few, DRAFTERS) == DRAFTERS, "two rounds show nothing"


def test_the_fastest_of_slow_trees_is_timed_in_every_process() -> None:
    """All of them seem slow where plain rounds ran in a quiet hour and theirs in a busy one."""
    slow = TreeTiming("lookup", CHAIN, 20.0, 2.0, 64), TreeTiming("lookup", FORK, 30.0, 2.0, 64)
    kept_speeds(KIND, [PLAINLY, *slow])
    assert KnownSpeeds().candidates(KIND, DRAFTERS) == DRAFTERS[:2]


def decoded(policy: Any, seconds: Sequence[float], tokens: Sequence[float]) -> tuple[float, Any]:
    """Plain rounds' seconds for 256 tokens by a policy's choices, and what its candidates did."""
    elapsed, emitted, totals = 0.0, 0.0, [Measurement()] * len(seconds)
    while emitted < 256:
        index, rounds = policy.choose()
        rounds = min(rounds, 16)  # A launch ends where another one leads.
        shown = np.full((rounds, len(seconds)), np.nan)
        shown[:, 0], shown[:, index] = 1.0, tokens[index]
        gained = rounds * tokens[index]
        seen = Measurement(rounds, rounds, int(gained), rounds * seconds[index], shown)
        elapsed, emitted = elapsed + seen.seconds, emitted + gained
        policy, totals[index] = policy.observe(index, seen), totals[index] + seen
    return elapsed * 256 / emitted, totals


@pytest.mark.parametrize("tokens", [1.0, 3.0], ids=["useless", "useful"])
@pytest.mark.parametrize("kept", [(50.0, 1.0), (0.1, 3.0)], ids=["slow", "fast"])
def test_a_process_recovers_from_what_others_kept(spec, kept, tokens) -> None:
    """Forged figures cost a few rounds of the first call, and the next call knows better."""
    plan, times = planned(spec), RoundTimes((1.0, 2.0))
    kind = settle(plan, KnownSpeeds(), streams=False, identical=True).kind
    assert kind is not None
    kept_speeds(kind, [PLAINLY, TreeTiming("longspec", CHAIN, *kept, 1000)])
    speeds, best = KnownSpeeds(), min(256, 256 * 2 / tokens)
    for most in (1.06, 1.02):
        settled = settle(plan, speeds, streams=False, identical=True)
        drafters = settled.plan.drafters
        assert [drafter.tree for drafter in drafters] == [PLAIN, CHAIN]
        elapsed, totals = decoded(settled.policy(times), times.seconds, [1.0, tokens])
        assert elapsed <= most * best
        assert tokens == 3.0 or totals[1].rounds <= 12
        speeds.learn(kind, drafters, totals, times)
    tree = next(one for one in kept_speeds(kind) if one.tree == CHAIN)
    assert tree.seconds == 2 * kept_speeds(kind)[0].seconds, "of one warm-up"


def test_what_processes_leave_out_is_tried_again_by_a_later_one(spec) -> None:
    """Where a call runs one tree to its end, no clock of its own can show that another pays."""
    plan = planned(spec)
    kind = settle(plan, KnownSpeeds(), streams=False, identical=False).kind
    assert kind is not None
    kept_speeds(kind, [PLAINLY, TreeTiming("longspec", CHAIN, 9.0, 2.0, 1000)])
    ran, processes = [], 0
    while len(ran) < 2:
        speeds = KnownSpeeds()
        ran = settle(plan, speeds, streams=False, identical=False).plan.drafters
        processes += 1
        for _ in range(2):  # Further calls of a process say no more.
            speeds.learn(kind, ran, [Measurement(90, 90, 90, 90.0)] * len(ran))
    assert processes == 7


def test_seconds_of_another_hour_are_no_verdict() -> None:
    before = KnownSpeeds()
    seen = Measurement(20, 20, 20, 20.0), Measurement(20, 20, 60, 24.0), Measurement()
    before.learn(KIND, DRAFTERS, seen, RoundTimes((1.0, 1.2, 1.5)))
    busy = KnownSpeeds()
    slow = Measurement(20, 20, 20, 90.0), Measurement(20, 20, 60, 400.0)
    busy.learn(KIND, DRAFTERS[:2], slow, RoundTimes((3.0, 3.9)))
    known = {one.tree: one for one in kept_speeds(KIND)}
    assert (known[PLAIN].seconds, known[CHAIN].seconds) == (3.0, 3.9)
    busy.learn(KIND, DRAFTERS[1:2], slow[1:])
    assert {one.tree: one for one in busy.find(KIND)}[CHAIN].seconds == 3.9, "not beside plain"


def test_rounds_correct_what_was_known() -> None:
    known = KnownSpeeds()
    known.learn(KIND, DRAFTERS[:1], [Measurement(30, 30, 30, 30.0)])
    known.learn(KIND, DRAFTERS[:1], [Measurement(60, 60, 60, 75.0)])
    known.learn(KIND, DRAFTERS[:1], [Measurement()])
    [plain] = known.find(KIND)
    assert plain.seconds == pytest.approx((30 * 1.0 + 60 * 1.25) / 90) and plain.rounds == 90


def test_figures_are_read_as_they_were_written(folder) -> None:
    timings = PLAINLY, TreeTiming("longspec", DEFAULT_TREE, 0.75, 3.5, 4)
    kept_speeds("one", timings)
    kept_speeds("two", timings[:1])
    assert kept_speeds("one") == timings and kept_speeds("two") == timings[:1]
    assert kept_speeds("three") == ()
    kept_speeds("one", timings[1:])
    assert kept_speeds("one") == timings[1:] and kept_speeds("two") == timings[:1]


def aged(text: str) -> str:
    """The file as it was written forty days ago."""
    aged = [[*row[:-1], row[-1] - 40 * 86400] for row in json.loads(text)["one"]]
    return json.dumps({"one": aged})


def test_figures_of_a_tree_that_no_call_runs_grow_old(folder) -> None:
    """Though calls of its kind go on: after a month it is tried again."""
    slow = TreeTiming("longspec", DEFAULT_TREE, 9.0, 1.0, 30)
    kept_speeds("one", [PLAINLY, slow])
    file = folder / "speeds.json"
    file.write_text(json.dumps({"one": [[*row[:-1], row[-1] - 10] for row in rows(file)]}))
    before = [row[-1] for row in rows(file)]
    kept_speeds("one", [dataclasses.replace(PLAINLY, rounds=60), slow])
    after = [row[-1] for row in rows(file)]
    assert after[0] > before[0] and after[1] == before[1]


def rows(file: Path) -> list[list[Any]]:
    return json.loads(file.read_text())["one"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: "7",
        lambda text: text.replace("0.5", "-1"),
        lambda text: text.replace("0.5", '"x"'),
        lambda text: text.replace("none", "so wide"),
        lambda text: text.replace("1.0", "99"),
        lambda text: text.replace(" 3,", ' "3",'),
        lambda text: text.replace(" 3,", " null,"),
        lambda text: "[" * 100_000,
        aged,
    ],
    ids=[
        *("torn", "list", "number", "negative", "text", "tree", "many"),
        *("rounds", "no rounds", "deep", "old"),
    ],
)
def test_damaged_and_old_figures_count_for_nothing(folder, damage) -> None:
    timings = (TreeTiming("plain", PLAIN, 0.5, 1.0, 3),)
    kept_speeds("one", timings)
    file = folder / "speeds.json"
    file.write_text(damage(file.read_text()))
    assert kept_speeds("one") == ()
    kept_speeds("one", timings)
    assert kept_speeds("one") == timings, "and are written anew"


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path / "file"))
    kept_speeds("one", [PLAINLY])
    assert kept_speeds("one") == ()


def test_a_useless_draft_is_told_of_though_it_is_soon_given_up(spec) -> None:
    notices: list[str] = []
    spec._notices._warn = notices.append
    look = spec._notices.look_at_speeds
    look([PLAINLY, TreeTiming("longspec", CHAIN, 2.0, 1.01, 30)])
    look([PLAINLY, TreeTiming("longspec", CHAIN, 2.0, 1.01, 4)])
    look([PLAINLY, TreeTiming("longspec", CHAIN, 2.0, 2.01, 30)])
    look([])
    assert notices == ["at most 0.01 of the draft's tokens were accepted per round"]


def test_machines_have_their_default_tree(monkeypatch) -> None:
    arrays = [jax.ShapeDtypeStruct((size,), jnp.bfloat16) for size in (10**6, 10**9)]
    small, large = map(is_large, arrays)
    defaults = bound_draft(toy_spec()).default_trees
    assert (
        candidates.likely_trees(defaults, small, None)
        == candidates.likely_trees(defaults, large, None)
        == (CHAIN, PLAIN)
    )
    alone = TreeConfig((), 6, lookup=5)
    looks_up = dataclasses.replace(defaults, cpu=(*defaults.cpu, alone))
    assert candidates.likely_trees(looks_up, small, None) == (CHAIN, alone, PLAIN), (
        "few are compiled"
    )
    assert candidates.likely_trees(looks_up, small, make_mesh()) == (CHAIN,)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    small, large = map(is_large, arrays)
    assert candidates.likely_trees(defaults, small, None) == (HALF, WIDE, PLAIN)
    assert candidates.likely_trees(defaults, large, None) == (DEFAULT_TREE,)
    assert candidates.likely_trees(defaults, large, None, rows=3) == (DEFAULT_TREE,)
    assert candidates.likely_trees(defaults, small, None, rows=4) == (HALF, WIDE, PLAIN)
    together = candidates.likely_trees(defaults, large, None, rows=4)
    assert [tree.num_nodes for tree in together] == [64, 32, 16, 1]
    assert {tree.widths for tree in together[:3]} == {DEFAULT_TREE.widths}
    assert candidates.likely_trees(defaults, large, make_mesh(), rows=4) == (DEFAULT_TREE,)
    lookup = NgramDraft().default_trees  # Of a kind that says nothing of several rows.
    assert candidates.likely_trees(lookup, large, None, rows=32) == lookup.large
    chains = candidates.likely_trees(defaults, large, None, sparse=True)
    assert [str(tree) for tree in chains] == ["chain:4", "chain:3", "chain:5", "none"]
    short = dataclasses.replace(defaults, large=(TreeConfig((8, 16, 16)),))
    chains = candidates.likely_trees(short, large, None, sparse=True)
    assert [str(tree) for tree in chains] == ["chain:3", "none"]


@pytest.mark.full
def test_several_rows_of_a_large_target_have_smaller_trees(spec, monkeypatch) -> None:
    """Three rows run the default tree; rows that wait for a slot are not decoded together."""
    defaults = dataclasses.replace(
        bound_draft(spec).default_trees, large=(FORK,), together=(FORK, FEWER)
    )
    monkeypatch.setattr(models, "is_large", lambda params: True)
    monkeypatch.setattr(LongSpecDraft, "default_trees", defaults)
    large = dataclasses.replace(spec)
    rows = [PROMPT, PROMPT * 2, PROMPT, "ab"]
    result, _ = told(large, rows[:3])
    assert [use.tree for use in result.stats.trees] == [FORK]
    result, _ = told(large, rows)
    assert [use.tree for use in result.stats.trees] == [PLAIN, FEWER, FORK]
    for slots, trees in ((3, [FORK]), (None, [FORK, FEWER])):
        each = dataclasses.replace(large, max_num_seqs=slots)
        drafters, _ = candidates.drafters_for(each, None, 5, adaptive=False)
        assert [drafter.tree for drafter in drafters if drafter.tree.num_levels] == trees
