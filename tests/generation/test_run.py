"""Phases are timed apart: nothing compiles in a timed one, and what ends early ends cleanly."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax import PLAIN, LongSpec
from longspec_jax.decoding.runner import ModelRunner, chunk_of
from longspec_jax.drafters.checkpoints.longspec import save_draft
from longspec_jax.generation.activity import Compiling, DecodingPlainly, Prefilling
from longspec_jax.generation.call import Shape
from longspec_jax.generation.run import Run
from longspec_jax.ops.partitioned import one_device, use_mesh
from longspec_jax.sharding import make_mesh
from longspec_jax.weights import hf
from tests.infer.toys import STOP, TREE, bound_draft, rebound, toy_spec, toy_tokenizer
from tests.kit import compilations, in_tiers

PROMPT = [3 + position % 11 for position in range(75)]
"""Three chunks of 32."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The toy as checkpoints: loaded parameters are committed to devices, made ones are not."""
    spec = toy_spec(num_heads=4, model_width=32, mlp_width=54, vocab_size=18)
    folder = tmp_path_factory.mktemp("toy")
    hf.save_target(folder / "t", spec.target_config, spec.target_params, stop_tokens=(STOP,))
    toy_tokenizer().save_pretrained(folder / "t")
    draft = bound_draft(spec)
    save_draft(folder / "d", draft.config, draft.params.layer, target=spec.target_config)
    return folder / "t", folder / "d"


MESHES: list[dict[str, int]] = [{}, {"fsdp": 2, "tp": 2}, {"data": 2}]


@pytest.mark.parametrize("mesh", in_tiers(MESHES, {}), ids=str)
def test_no_timed_phase_compiles(folders, monkeypatch, mesh) -> None:
    spec = LongSpec.from_pretrained(
        *folders, tree=TREE, prefill_chunk=32, mesh=make_mesh(**mesh) if mesh else None
    )
    timed: dict[str, int] = {}

    def counted(name: str, function):
        def call(*args, **options):
            with compilations() as found:
                result = function(*args, **options)
            timed[name] = timed.get(name, 0) + len(found)
            return result

        return call

    monkeypatch.setattr(Run, "prefill", counted("prefill", Run.prefill))
    rounds = Run.rounds
    monkeypatch.setattr(Run, "rounds", counted("rounds", lambda run: _Open(rounds(run))))
    options = dict(max_new_tokens=9, eos_token_id=[])
    if mesh:
        spec.generate(PROMPT, **options)
        assert timed == {"prefill": 0, "rounds": 0}
        return
    with compilations() as found:
        spec.compare(PROMPT, **options)
    assert found and timed == {"prefill": 0, "rounds": 0}
    spec.compare(PROMPT, **options, on_round=lambda added: None)
    assert timed == {"prefill": 0, "rounds": 0}
    with compilations() as found:
        spec.generate(PROMPT[:40], **options)
    assert not found, "other lengths of the same bucket are the same programs"


class _Open(list):
    """All rounds of a run, read at once; what closes a generator closes nothing here."""

    def close(self) -> None:
        pass


def test_the_chunk_follows_the_longest_prompt() -> None:
    chunks = [Shape.for_call(longest, 6, 3, 2048).chunk for longest in (48, 1, 65, 2049)]
    assert chunks == [64, 64, 128, 2048]
    assert Shape.for_call(48, 6, 3, 32).chunk == 32


def test_the_chunks_of_prompts_that_are_prefilled_alone() -> None:
    shape = Shape.for_call(600, 6, 3, 2048, alone=True)
    chunks = [chunk_of(prompt, shape.chunks) for prompt in (1, 128, 129, 512, 513)]
    assert chunks == [128, 128, 512, 512, 2048]
    assert shape.capacity >= 2048
    short = Shape.for_call(100, 6, 3, 2048, alone=True)
    assert short.chunk == 128 and short.chunks == shape.chunks[:1]


def test_calls_shorter_than_expected_share_a_shape() -> None:
    longest = Shape.for_call(5000, 100, 3, 256)
    assert Shape.for_call(300, 100, 3, 256, expected=5100) == longest
    assert Shape.for_call(300, 100, 3, 256).capacity < longest.capacity
    assert Shape.for_call(5000, 100, 3, 256, expected=400) == longest


def test_activities_are_told_in_order() -> None:
    spec, told = dataclasses.replace(toy_spec(), prefill_chunk=16), []
    options = dict(max_new_tokens=5, eos_token_id=[], on_activity=told.append)
    spec.compare(PROMPT, **options, on_round=lambda added: None)
    kinds = list(dict.fromkeys(map(type, told)))
    assert kinds == [Compiling, Prefilling, DecodingPlainly]
    prefill = [activity.done for activity in told if isinstance(activity, Prefilling)]
    assert prefill == sorted(set(prefill)) and prefill[:4] == [0, 16, 32, 48]
    assert [a.done for a in told if isinstance(a, DecodingPlainly)] == [0, 1, 2, 3, 4, 5]
    assert all(a.total == 75 for a in told if isinstance(a, Prefilling))


def test_the_first_prompt_of_rows_that_wait_is_reported_until_its_row_says_something() -> None:
    spec, told = dataclasses.replace(toy_spec(), prefill_chunk=16, max_num_seqs=1), []
    options = dict(max_new_tokens=5, eos_token_id=[], on_activity=told.append)
    said = spec.stream([PROMPT, PROMPT], **options)
    next(said)
    before = [(a.done, a.total) for a in told if isinstance(a, Prefilling)]
    assert before[-1][0] >= 48 and {total for _, total in before} == {75}
    assert sorted(before) == before
    list(said)
    assert len([a for a in told if isinstance(a, Prefilling)]) == len(before)


def test_a_stream_can_be_closed() -> None:
    stream = toy_spec().stream(PROMPT, max_new_tokens=60, eos_token_id=[])
    next(stream), next(stream)
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    # The thread that waits for the round under way ends with it.
    for thread in threading.enumerate():
        if thread.name.startswith("launch-reader"):
            thread.join(timeout=30)
            assert not thread.is_alive()


def test_a_streamer_is_ended_whatever_happens() -> None:
    """Somebody may wait for the end in another thread."""
    values, ended = [], []

    class Streamer:
        def put(self, value):
            values.append(np.asarray(value).reshape(-1).tolist())
            if len(values) == 2:
                raise OSError("the reader is gone")

        def end(self):
            ended.append(True)

    with pytest.raises(OSError, match="reader is gone"):
        toy_spec().generate(PROMPT, streamer=Streamer(), max_new_tokens=9, eos_token_id=[])
    assert values[0] == PROMPT and ended == [True]
    with pytest.raises(ValueError, match="temperature"):
        toy_spec().generate(PROMPT, streamer=Streamer(), temperature=-1)
    assert ended == [True] * 2
    with pytest.raises(ValueError, match="follows one row"):
        toy_spec().generate([PROMPT, PROMPT], streamer=Streamer())
    assert ended == [True] * 3


@pytest.mark.parametrize(
    ("on_round", "temperature"), [(None, 1.0), (lambda added: None, 0.0)], ids=["loop", "rounds"]
)
def test_logits_that_are_not_finite_stop_the_run(on_round, temperature) -> None:
    spec = toy_spec()
    options = dict(max_new_tokens=9, temperature=temperature, eos_token_id=[], on_round=on_round)
    token = spec.generate(PROMPT[:9], **options).sequences[0][3]
    embedding = spec.target_params["embedding"].at[token].set(jnp.inf)
    spoiled = dataclasses.replace(
        spec, target_params={**spec.target_params, "embedding": embedding}
    )
    with pytest.raises(FloatingPointError, match="logits .*after .* tokens are not finite"):
        spoiled.generate([PROMPT, PROMPT[:9]], **options)


def test_a_draft_that_is_never_right_is_told_once(monkeypatch) -> None:
    spec = dataclasses.replace(toy_spec(), tree=(1,))
    zeros = jax.tree.map(jnp.zeros_like, bound_draft(spec).params.layer)
    spec = rebound(spec, zeros, vocabulary=[16])
    options = dict(max_new_tokens=80, eos_token_id=[], temperature=1.0, top_k=3)
    with pytest.warns(UserWarning, match="seems to belong to another target"):
        spec.compare(PROMPT, **options)
    spec.generate(PROMPT, **options)  # A second warning would be an error.
    toy_spec().generate(PROMPT, **options)


def test_one_device_of_several_keeps_its_kernels() -> None:
    assert jax.device_count() > 1
    assert one_device()
    plan, _ = toy_spec()._prepare(PROMPT, None, {})
    with use_mesh(plan.target.mesh):
        assert one_device()
    with use_mesh(make_mesh(tp=2).abstract_mesh):
        assert not one_device()


def test_comparisons_run_both_in_the_same_way(monkeypatch) -> None:
    begin, ways = Run.__post_init__, []

    def noted(run):
        begin(run)
        ways.append((run.engine.runner.streams, run.plan.drafter.tree == PLAIN))

    options = dict(max_new_tokens=5, eos_token_id=[])
    for on_round in (None, lambda added: None):
        toy_spec().compare(PROMPT, **options, on_round=on_round)  # Compiles beforehand.
        with monkeypatch.context() as inside:
            inside.setattr(Run, "__post_init__", noted)
            toy_spec().compare(PROMPT, **options, on_round=on_round)
    assert ways == [(False, False), (False, True), (True, False), (True, True)]


def test_ctrl_c_is_honoured_between_two_launches(monkeypatch) -> None:
    """No launch takes longer than a part of a second, so that a call can be interrupted."""
    spec, launches = toy_spec(), []
    launch = ModelRunner.launch

    def interrupted(runner, rows, choice, *others):
        launches.append(choice.rounds)
        if len(launches) == 3:
            raise KeyboardInterrupt
        return launch(runner, rows, choice, *others)

    spec.generate(PROMPT, max_new_tokens=400, eos_token_id=[])
    monkeypatch.setattr(ModelRunner, "launch", interrupted)
    monkeypatch.setattr("longspec_jax.decoding.inflight.LAUNCH_SECONDS", 1e-6)
    with pytest.raises(KeyboardInterrupt):
        spec.generate(PROMPT, max_new_tokens=400, eos_token_id=[])
    assert launches == [1, 1, 1]
