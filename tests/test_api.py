"""The Python interface: what comes out does not depend on how it was asked for."""

import dataclasses
import importlib
import math
from importlib import metadata
from typing import Any

import jax
import numpy as np
import pytest
from transformers import GenerationConfig

import longspec_jax
from longspec_jax import PLAIN, LongSpec, TreeConfig
from longspec_jax.decoding import warmup
from longspec_jax.drafters.retrieval.hierarchy import RetrievalDraft, RetrievalOptions
from longspec_jax.generation import memory
from longspec_jax.generation.warm import WarmShapes
from longspec_jax.sharding import make_mesh, param_shardings
from tests.infer.toys import STOP, TREE, bound_draft, rebound, toy_spec, toy_tokenizer
from tests.kit import compilations, each_row, in_tiers, tiny_target_config

PROMPTS = ["ab cd gh é", "fgh €€ abc", "d"]
WARM = dict(temperature=1.0, seed=[3, 4, 5], max_new_tokens=24)


@pytest.fixture(scope="module")
def spec() -> LongSpec:
    return toy_spec()


@pytest.fixture(scope="module")
def batch(spec):
    return spec.generate(PROMPTS, **WARM, eos_token_id=[])


def test_a_cell_that_ends_with_the_model_shows_a_line(spec) -> None:
    shown = "LlamaForCausalLM, layers 1, width 36, float32, draft longspec"
    assert repr(spec) == f"LongSpec({shown})"
    assert repr(dataclasses.replace(spec, draft=None)).endswith("float32, draft none)")


def test_speculation_pays_and_is_counted(spec, batch) -> None:
    stats = batch.stats
    assert stats.new_tokens == (24, 24, 24) and stats.decode_tokens == 3 * 23
    assert stats.prompt_tokens == tuple(len(toy_tokenizer()(text)["input_ids"]) for text in PROMPTS)
    assert 1 < stats.acceptance_length == stats.decode_tokens / sum(stats.target_passes)
    # A window of 37 tokens, whatever the context: tests/decoding/test_lossless.py.
    state = 3 * 2 * 37 * 2 * 6 * 4
    assert stats.draft_state_bytes == stats.memory.draft_state_bytes == state
    histogram = stats.acceptance_histogram
    assert sum(histogram) == sum(stats.target_passes) and len(histogram) == 3
    for row, passes, rounds in zip(
        batch.drafted, stats.target_passes, stats.histograms, strict=True
    ):
        assert not row[0], "the first token is drawn from the prefill"
        # A round emits its accepted tokens and a bonus, unless the budget cuts the bonus off.
        assert 23 - sum(row) in (passes, passes - 1)
        assert sum(rounds) == passes
        assert sum(row) == sum(accepted * count for accepted, count in enumerate(rounds))


def test_rows_equal_lone_plain_runs(spec, batch) -> None:
    for index, prompt in enumerate(PROMPTS):
        options = {**WARM, "seed": WARM["seed"][index]}
        alone = spec.generate(prompt, tree=PLAIN, **options, eos_token_id=[])
        assert alone.sequences == (batch.sequences[index],)
        assert alone.text == (batch.text[index],)
        assert alone.stats.acceptance_length == 1 and alone.stats.draft_state_bytes == 0
        assert not any(alone.drafted[0])


def test_stream_equals_generate(spec, batch) -> None:
    rounds = list(spec.stream(PROMPTS, **WARM, eos_token_id=[]))
    for row in range(3):
        assert sum((r.tokens[row] for r in rounds), ()) == batch.sequences[row]
        assert sum((r.drafted[row] for r in rounds), ()) == batch.drafted[row]
        assert "".join(r.text[row] for r in rounds) == batch.text[row]
        whole = toy_tokenizer().decode(batch.sequences[row], skip_special_tokens=True)
        assert batch.text[row] == whole
    assert rounds[0].stats.decode_tokens == 0 and math.isnan(rounds[0].stats.acceptance_length)
    assert rounds[-1].stats.histograms == batch.stats.histograms


def test_the_tree_of_a_call_is_counted(batch) -> None:
    [use] = batch.stats.trees
    assert use.tree == TREE and use.rounds == max(batch.stats.target_passes)
    assert use.tokens == 3 * 23 and 0 < use.seconds <= batch.stats.decode_seconds


def test_adaptive_calls_say_the_same_and_what_ran(spec, batch, monkeypatch) -> None:
    times = warmup.RoundTimes((1.0e-3, 1.1e-3, 1.2e-3), 0.0)
    monkeypatch.setattr(warmup, "round_times", lambda *_: times)
    found = spec.generate(PROMPTS, adaptive=True, **WARM, eos_token_id=[])
    assert found.sequences == batch.sequences and found.text == batch.text
    stats = found.stats
    assert [use.tree.widths for use in stats.trees] == [(), (1,), (4, 5)]
    # A tree is looked at where it may pay by the seconds of the warm-up; with these one does.
    assert any(use.rounds >= 2 for use in stats.trees if use.tree.num_levels)
    assert sum(use.rounds for use in stats.trees) == max(stats.target_passes)
    assert sum(use.tokens for use in stats.trees) == stats.decode_tokens
    assert len(stats.acceptance_histogram) == 3
    assert stats.draft_state_bytes == batch.stats.draft_state_bytes
    # Rounds launched one by one are programs of their own: compiled by the first stream, not again.
    assert next(spec.stream(PROMPTS, adaptive=True, **WARM)).stats.compile_seconds > 0.0
    rounds = list(spec.stream(PROMPTS, adaptive=True, **WARM, eos_token_id=[]))
    assert rounds[0].stats.compile_seconds == 0.0
    for row in range(3):
        assert sum((r.tokens[row] for r in rounds), ()) == batch.sequences[row]
    assert len(rounds) == max(rounds[-1].stats.target_passes) + 1
    assert spec.compare(PROMPTS, adaptive=True, **WARM).identical
    with pytest.raises(ValueError, match="adaptive=True has nothing to choose"):
        spec.generate(PROMPTS, tree=PLAIN, adaptive=True)


def test_every_row_stops_at_its_own_set(spec, batch) -> None:
    stops = [[batch.sequences[0][5]], [], [batch.sequences[2][3], 16]]
    stopped = spec.generate(PROMPTS, **WARM, eos_token_id=stops)
    for row, (stop, whole) in enumerate(zip(stops, batch.sequences, strict=True)):
        ends = [index for index, token in enumerate(whole) if token in stop]
        assert stopped.sequences[row] == whole[: ends[0] + 1 if ends else None]
    assert stopped.stats.new_tokens[1] == 24


def test_model_stop_tokens_are_the_default(spec) -> None:
    result = spec.generate(PROMPTS, temperature=1.5, seed=[1, 2, 3], max_new_tokens=60)
    for tokens in result.sequences:
        assert STOP not in tokens[:-1] and (len(tokens) == 60 or tokens[-1] == STOP)
    assert any(len(tokens) < 60 for tokens in result.sequences)
    assert not any("<end>" in text for text in result.text)


def test_budgets_by_row(spec, batch) -> None:
    result = spec.generate(PROMPTS, **{**WARM, "max_new_tokens": [1, 7, 24]}, eos_token_id=[])
    assert result.sequences == tuple(batch.sequences[r][:n] for r, n in enumerate((1, 7, 24)))


def test_generation_config(spec, batch) -> None:
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=24, pad_token_id=0)
    same = spec.generate(PROMPTS, config, seed=WARM["seed"], eos_token_id=[])
    assert same.sequences == batch.sequences
    with pytest.raises(NotImplementedError, match="num_beams=3: not supported"):
        spec.generate(PROMPTS, GenerationConfig(num_beams=3))


def test_transformers_streamer(spec) -> None:
    class Recorder:
        values, ended = [], False

        def put(self, value):
            self.values.append(np.asarray(value).reshape(-1).tolist())

        def end(self):
            self.ended = True

    recorder = Recorder()
    options = {**WARM, "seed": 3}
    result = spec.generate(PROMPTS[0], streamer=recorder, **options)
    prompt, *rounds = recorder.values
    assert prompt == toy_tokenizer()(PROMPTS[0])["input_ids"] and recorder.ended
    assert tuple(sum(rounds, [])) == result.sequences[0]
    with pytest.raises(ValueError, match="follows one row"):
        spec.generate(PROMPTS, streamer=recorder)


def test_compare_finds_no_difference(spec) -> None:
    rounds = []
    found = spec.compare(PROMPTS, **WARM, on_round=rounds.append)
    assert found.identical and found.divergences == ()
    assert found.speculative.sequences == found.plain.sequences
    assert found.plain.stats.acceptance_length == 1 < found.speculative.stats.acceptance_length
    assert len(rounds) == max(found.speculative.stats.target_passes) + 1
    with pytest.raises(ValueError, match="nothing to compare"):
        spec.compare(PROMPTS, tree=PLAIN)


def test_compare_reports_where_and_how_close(spec, monkeypatch) -> None:
    """A corrupted run must be noticed, its first wrong token named, and the gap positive."""
    comparison = importlib.import_module("longspec_jax.generation.comparison")
    follow = comparison.follow

    def corrupt(run, *args):
        result = follow(run, *args)
        if not run.plan.drafter.tree.widths:
            return result
        first, second, third = result.sequences
        wrong = (*second[:4], (second[4] + 1) % 17, *second[5:])
        return dataclasses.replace(result, sequences=(first, wrong, third))

    monkeypatch.setattr(comparison, "follow", corrupt)
    found = spec.compare(PROMPTS, **WARM, eos_token_id=[])
    [divergence] = found.divergences
    assert not found.identical and (divergence.row, divergence.index) == (1, 4)
    assert divergence.plain_token == found.plain.sequences[1][4]
    assert divergence.speculative_token == (divergence.plain_token + 1) % 17
    assert divergence.gap > 0, "the plain token is the argmax of the plain scores"


def test_inspect_shows_the_rounds_of_generate(spec, batch) -> None:
    options = {**WARM, "seed": WARM["seed"][0]}
    views = list(spec.inspect(PROMPTS[0], **options, eos_token_id=[]))
    drawn = [depth.drawn for view in views for depth in view.depths]
    assert tuple(drawn)[:23] == batch.sequences[0][1:]
    assert [view.pending for view in views][0] == batch.sequences[0][0]
    assert len(views) == batch.stats.target_passes[0]
    for view in views:
        *path, last = view.depths
        assert all(depth.accepted for depth in path) and not last.accepted
        assert all("accepted" in depth.verdict for depth in path)
        assert len(view.depths[0].candidates) == TREE.widths[0]
        for depth in view.depths:
            assert len(depth.candidates) == len(depth.probabilities)
            assert 0 <= depth.drawn_probability <= 1


def test_prompts_of_many_lengths_meet_one_compilation(spec) -> None:
    def run(tokens: int) -> float:
        options = dict(max_new_tokens=3 + tokens % 5, tree=PLAIN)
        return spec.generate(np.arange(tokens) % 17, **options).stats.compile_seconds

    run(1)
    with compilations() as found:
        assert {run(tokens) for tokens in range(2, 240, 23)} == {0.0}
    assert not found


FEW = 3, 9, 1, 12, 7, 4


def test_a_draft_vocabulary_changes_only_the_speed(spec, batch) -> None:
    """What cannot be proposed is emitted all the same; the rows of the head are counted."""
    again = rebound(spec, vocabulary=FEW).generate(PROMPTS, **WARM, eos_token_id=[])
    assert again.sequences == batch.sequences
    said, drafted = (np.concatenate(rows) for rows in (again.sequences, again.drafted))
    assert drafted.any() and set(said[drafted]) <= set(FEW) and not set(said) <= set(FEW)
    rows = len(FEW) * (spec.target_config.model_width + 1) * 4
    assert again.stats.memory.draft_bytes == batch.stats.memory.draft_bytes + rows


def test_a_draft_vocabulary_that_does_not_fit(spec) -> None:
    with pytest.raises(ValueError, match="token 17, outside the target's 17 tokens"):
        rebound(spec, vocabulary=[3, 17])
    with pytest.raises(ValueError, match="token 3 2 times"):
        rebound(spec, vocabulary=[3, 1, 3])
    with pytest.raises(ValueError, match="only 2 continuations. Use a narrower tree"):
        rebound(spec, vocabulary=[3, 1]).generate("a", tree=(4,))


@pytest.mark.parametrize("few", in_tiers([None, FEW], FEW))
def test_a_draft_in_8_bits_changes_only_the_speed(spec, batch, few) -> None:
    """What it has of its own is counted."""
    rounded = rebound(spec, vocabulary=few, int8=True)
    again = rounded.generate(PROMPTS, **WARM, eos_token_id=[])
    assert again.sequences == batch.sequences
    assert again.stats.acceptance_length > 1
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(bound_draft(rounded).own_params))
    assert again.stats.memory.draft_bytes == own != batch.stats.memory.draft_bytes
    assert again.stats.memory.target_bytes == batch.stats.memory.target_bytes
    planned = rounded.check([[3] * 9] * 3, max_new_tokens=24).draft_bytes
    assert planned == again.stats.memory.draft_bytes


def test_options_need_a_draft() -> None:
    with pytest.raises(ValueError, match="draft_options=.*int8.* are about a draft, and none is"):
        LongSpec.from_pretrained("target", draft_options={"int8": True})


@pytest.mark.full
def test_sharded_parameters_say_the_same(spec) -> None:
    target = toy_spec(num_heads=4, model_width=32, mlp_width=54, vocab_size=18)
    mesh = make_mesh(tp=2)
    sharded = dataclasses.replace(
        target,
        target_params=jax.device_put(
            target.target_params, param_shardings(mesh, target.target_params)
        ),
        mesh=mesh,
    )
    layer = bound_draft(target).params.layer
    sharded = rebound(sharded, jax.device_put(layer, param_shardings(mesh, layer)))
    expected = target.generate(PROMPTS[0], max_new_tokens=9, tree=(3,)).sequences
    assert sharded.generate(PROMPTS[0], max_new_tokens=9, tree=(3,)).sequences == expected
    few = dict(vocabulary=[5, 3, 1, 8])
    for head in (few, dict(int8=True), dict(few, int8=True)):
        reduced = rebound(sharded, **head)
        if head.keys() >= few.keys():  # Each is a program of its own.
            found = reduced.generate(PROMPTS[0], max_new_tokens=9, tree=(3,))
            assert found.sequences == expected
        own = bound_draft(reduced).params
        half = own.head.codes if own.int8 else own.head
        assert half.sharding.shard_shape(half.shape)[0] == len(half) // 2


BAD_CALLS = {
    "too long": (
        dict(inputs=[[1] * 9, [1] * 1000], max_new_tokens=25),
        ValueError,
        "row 1: .*1000 tokens.*1025.*max_positions=1024; lower max_new_tokens to at most 24",
    ),
    "no template": (
        dict(inputs=[{"role": "user", "content": "a"}]),
        ValueError,
        "chat template and this tokenizer has none",
    ),
    "huge tree": (dict(inputs="a", tree=(17,) * 40), ValueError, "681 nodes"),
    "wide tree": (
        dict(inputs="a", tree=(18,), max_new_tokens=3),
        ValueError,
        "only 17 continuations",
    ),
    "option": (dict(inputs="a", temprature=1), TypeError, "did you mean 'temperature'"),
}


@each_row("case", BAD_CALLS)
def test_bad_calls_name_the_remedy(spec, case) -> None:
    arguments, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        spec.generate(**arguments)
    with pytest.raises(error, match=message):
        list(spec.stream(**arguments))
    if case != "wide tree":  # Known by tracing a round, which a check does not.
        with pytest.raises(error, match=message):
            spec.check(**arguments)


def test_parts_that_do_not_fit(spec) -> None:
    other = tiny_target_config(vocab_size=17, rope_theta=5e5)
    with pytest.raises(ValueError, match="rope_theta=10000.0 but the target"):
        dataclasses.replace(spec, target_config=other)
    with pytest.raises(ValueError, match="tokenizer knows 15 tokens and the target 11"):
        dataclasses.replace(spec, target_config=tiny_target_config(vocab_size=11))
    with pytest.raises(ValueError, match="needs a draft and none is loaded"):
        dataclasses.replace(spec, draft=None).generate("a", tree=TreeConfig((2,)))
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        dataclasses.replace(spec, tokenizer=None).generate("a")
    without = dataclasses.replace(spec, tokenizer=None)
    assert without.generate([3, 4], max_new_tokens=3).text == (None,)


def test_what_partial_passes_copy_is_planned(spec) -> None:
    """The working set of 96 slots for two rows; the summaries are the draft's state."""
    [draft], config = spec.drafts, spec.target_config
    options = RetrievalOptions(96, retrieve_recent=64)
    retrieving = dataclasses.replace(spec, draft=RetrievalDraft(draft, config, options))
    call: Any = dict(inputs=[[3] * 600] * 2, max_new_tokens=1)
    plans = [each.check(**call, tree="chain:2") for each in (retrieving, spec)]
    slot = plans[1].cache_bytes // (2 * plans[1].capacity)
    assert plans[0].working_bytes - plans[1].working_bytes == 2 * 96 * slot
    assert plans[0].draft_state_bytes - plans[1].draft_state_bytes > plans[0].cache_bytes / 32
    short = [each.check(**call, tree="chain:0/chain:2") for each in (retrieving, spec)]
    assert short[0].working_bytes == short[1].working_bytes, "one level reads it where it lies"


def test_memory_is_checked_before_allocation(spec, monkeypatch) -> None:
    plan = spec.check([[3] * 600] * 2, max_new_tokens=1)
    assert plan.cache_bytes == 2 * plan.capacity * 2 * 2 * 6 * 4
    call: Any = dict(inputs=[3, 4, 5, 6], max_new_tokens=3)
    assert spec.check(**call) == spec.generate(**call).stats.memory
    enough = plan.needed_bytes
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: enough)
    memory.check_fits(plan)
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: enough - 1)
    with pytest.raises(MemoryError, match="largest context that fits is 512 tokens"):
        memory.check_fits(plan)
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 0)
    with pytest.raises(
        MemoryError, match="No context fits .*smaller prefill_chunk or tree, free memory"
    ):
        spec.generate("a")


def test_the_hosts_memory_is_asked_only_about_an_offloaded_cache(spec, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(memory, "free_pinned_bytes", lambda: asked.append("asked"))
    spec.check("a", max_new_tokens=3)
    assert asked == []
    dataclasses.replace(spec, offload=True).check("a", max_new_tokens=3)
    assert asked == ["asked"]


def test_a_python_without_jax_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(longspec_jax.metadata, "version", nothing)
    with pytest.raises(ImportError, match=r"needs jax, .*: pip install -e \."):
        longspec_jax._required("jax")


def test_version_check() -> None:
    check = longspec_jax._check_versions
    for jax_version, flax_version in [("0.10.2", "0.12.8"), ("0.12.0.1", "0.12.12")]:
        check(jax_version, flax_version)
    with pytest.raises(ImportError, match="pip install -U 'flax>=0.12.9'"):
        check("0.11.2", "0.12.8")


def test_contents_can_be_imported() -> None:
    for name in longspec_jax.__all__:
        assert getattr(longspec_jax, name) is not None
    with pytest.raises(AttributeError):
        _ = longspec_jax.nonsense


def test_rows_beyond_the_slots_wait_and_say_the_same(spec) -> None:
    """Through every way of a call; memory is that of the slots and of one that is prefilled."""
    flowing = dataclasses.replace(spec, max_num_seqs=2)
    prompts = [[3, 4, 5], [6] * 40, [7, 8], [9, 10, 11, 12]]
    options = dict(max_new_tokens=[9, 3, 7, 1], temperature=[0, 1.0, 0.7, 0], seed=[1, 2, 3, 4])
    expected = spec.generate(prompts, **options)
    result = flowing.generate(prompts, **options)
    assert result.sequences == expected.sequences and result.text == expected.text
    assert result.drafted == expected.drafted
    assert result.stats.histograms == expected.stats.histograms
    assert result.stats.memory.batch == 3
    assert 3 * expected.stats.memory.cache_bytes == 4 * result.stats.memory.cache_bytes
    streamed = [""] * 4
    for added in flowing.stream(prompts, **options):
        streamed = [text + new for text, new in zip(streamed, added.text, strict=True)]
    assert tuple(streamed) == expected.text
    compared = flowing.compare(prompts, **options)
    assert compared.identical and compared.speculative.sequences == expected.sequences


def test_slots_that_are_not_needed_change_nothing(spec) -> None:
    """Each number of rows is a shape of its own, compiled before it is timed."""
    roomy = dataclasses.replace(spec, max_num_seqs=8, _warm=WarmShapes())
    compiled = [
        roomy.generate([[3, 4]] * rows, max_new_tokens=5).stats.compile_seconds for rows in (1, 2)
    ]
    assert min(compiled) > 0
    assert roomy.generate([[3, 4]] * 2, max_new_tokens=5).stats.compile_seconds == 0


def test_the_plan_of_slots_on_a_mesh() -> None:
    """Half of the slots' rows on each device, and all of the one that is prefilled."""
    target = toy_spec(num_heads=4, model_width=32, mlp_width=54, vocab_size=18)
    mesh = make_mesh(data=2)
    params = jax.device_put(target.target_params, param_shardings(mesh, target.target_params))
    spread = dataclasses.replace(target, target_params=params, draft=None, mesh=mesh, tree=None)

    def planned(spec: Any, rows: int) -> Any:
        return spec.check([[3] * 20] * rows, max_new_tokens=5)

    one, flowing = planned(spread, 1), planned(dataclasses.replace(spread, max_num_seqs=4), 64)
    assert flowing.cache_bytes == (4 // 2 + 1) * one.cache_bytes
    assert planned(spread, 4).cache_bytes == 2 * one.cache_bytes
