"""Requests over an engine: each gets the text that a call of its own gets."""

import gc
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from longspec_jax import GenerateResult, LongSpec, TreeConfig
from longspec_jax.checks import Refused
from longspec_jax.config import serving
from longspec_jax.config.tree import PLAIN
from longspec_jax.decoding.jit_cache import PROGRAMS
from longspec_jax.decoding.slots import EngineStatus
from longspec_jax.generation import inputs as inputs_lib
from longspec_jax.generation import requests as requests_lib
from longspec_jax.generation.requests import RequestEngine
from longspec_jax.generation.text import RequestOutput
from tests.infer.toys import STOP, toy_spec
from tests.kit import compilations
from tests.refusals import wrong

PROMPTS = ["ab cd gh é", "cd", "é ab ab ab gh cd", "gh ab"]
OPTIONS = [
    {"max_new_tokens": 9},
    {"max_new_tokens": 14, "temperature": 1.0, "seed": 3},
    {"max_new_tokens": 1, "temperature": 0.7, "top_p": 0.9, "eos_token_id": []},
    {"max_new_tokens": 20, "temperature": 1.0, "top_k": 5, "seed": 4},
]


def finished(engine: RequestEngine) -> dict[int, list[RequestOutput]]:
    found = defaultdict(list)
    while engine.busy:
        for output in engine.step():
            found[output.id].append(output)
    return found


def test_requests_get_the_text_of_calls_of_their_own() -> None:
    spec = toy_spec()
    with spec.engine(max_num_seqs=2, max_model_len=64) as engine:
        ids = [engine.submit(*one, **more) for *one, more in zip(PROMPTS, OPTIONS, strict=True)]
        outputs = finished(engine)
        alone = decoded_plainly(spec, PROMPTS, OPTIONS)
        for id, tokens, text, options in zip(
            ids, alone.sequences, alone.text, OPTIONS, strict=True
        ):
            parts = outputs[id]
            assert sum((part.tokens for part in parts), ()) == tokens
            assert "".join(part.text for part in parts) == text
            assert [part.finish for part in parts[:-1]] == [None] * (len(parts) - 1)
            full = len(tokens) == options["max_new_tokens"]
            assert parts[-1].finish == "length" if full else "stop"
        assert sum(use.rounds for use in engine.trees) > 0


def test_a_tokenizer_that_fails_ends_its_own_request() -> None:
    """While it reads a text, or before the first token: then the engine has taken nothing."""
    spec = toy_spec()
    with spec.engine(max_num_seqs=2, max_model_len=64) as engine:
        given = [{"max_new_tokens": 14, "temperature": 1.0, "seed": seed} for seed in (3, 4, 5)]
        ids = [engine.submit("cd", eos_token_id=[], **one) for one in given]
        expected = {
            id: "".join(part.text for part in parts) for id, parts in finished(engine).items()
        }
        again = [engine.submit("cd", eos_token_id=[], **one) for one in given]
        reader, left = engine._texts[again[1]], [2]

        def broken(output: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyError(12)
            return type(reader).take(reader, output)

        reader.take = broken  # type: ignore[method-assign]
        outputs = finished(engine)
        assert engine.status.recoveries == 0 and not engine.engine.live
        for first, id in zip(ids, again, strict=True):
            text, last = "".join(part.text for part in outputs[id]), outputs[id][-1]
            if id == again[1]:
                assert last.finish == "error" and last.reason == "KeyError: 12"
                assert 0 < len(text) < len(expected[first]) and expected[first].startswith(text)
            else:
                assert text == expected[first] and last.finish == "length"

        def no_text(*_: Any) -> Any:
            raise KeyError(13)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(inputs_lib, "RowText", no_text)
            engine.submit("cd", max_new_tokens=3)
        assert not engine.busy


def decoded_plainly(
    spec: LongSpec, prompts: Sequence[Any], options: Sequence[dict[str, Any]]
) -> GenerateResult:
    """Plain decoding of some requests. A batch of many rows takes as long as one."""
    usual = {"seed": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "eos_token_id": [STOP]}
    return spec.generate(
        list(prompts),
        max_new_tokens=[each["max_new_tokens"] for each in options],
        **{name: [each.get(name, value) for each in options] for name, value in usual.items()},
        tree=PLAIN,
    )


TEXT = np.random.default_rng(0).integers(1, 15, 4000).tolist()


def mixed(count: int, seed: int, most: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts that share beginnings, of all lengths, with all kinds of options."""
    random, found = np.random.default_rng(seed), []
    for index in range(count):
        new = int(random.integers(1, 25))
        length = int(random.choice([1, 5, 63, 64, 65, 130, 150, most]))
        shared, offset = int(random.integers(0, 180)), int(random.integers(0, 3000))
        prompt = (TEXT[:shared] + TEXT[offset:])[: max(1, min(length, most - new))]
        options: dict[str, Any] = {"max_new_tokens": new, "seed": index}
        options |= [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}][index % 3]
        options |= {"eos_token_id": []} if index % 4 == 0 else {}
        found.append((prompt, options))
    return found


def served(
    engine: RequestEngine, requests: Sequence[tuple[list[int], dict[str, Any]]], seed: int = 0
) -> dict[int, tuple[int, ...]]:
    """Tokens by index of requests that come a few at a time, in two priorities; some are cancelled.

    Returns when all launches were read.
    """
    random, waiting = np.random.default_rng(seed), list(enumerate(requests))[::-1]
    index_of: dict[int, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    while waiting or engine.busy or engine.engine.prefilling:
        for _ in range(min(int(random.integers(0, 3)), len(waiting))):
            index, (prompt, options) = waiting.pop()
            id = engine.submit(prompt, priority=int(random.integers(0, 2)), **options)
            index_of[id], found[index] = index, ()
        for output in engine.step():
            found[index_of[output.id]] += output.tokens
        if random.random() < 0.02 and engine.engine.live:
            id = int(random.choice(engine.engine.live))
            engine.cancel(id)
            del found[index_of[id]]
    return found


def assert_as_alone(
    spec: LongSpec,
    requests: Sequence[tuple[list[int], dict[str, Any]]],
    found: dict[int, tuple[int, ...]],
) -> None:
    """Whether each text is that of plain decoding."""
    alone = decoded_plainly(spec, *zip(*[requests[index] for index in sorted(found)], strict=True))
    for index, expected in zip(sorted(found), alone.sequences, strict=True):
        assert found[index] == expected, f"request {index}"


def held_arrays() -> tuple[int, int]:
    """How many arrays there are on the device, and their bytes."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def test_what_was_prepared_serves_everything_without_compiling_in_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mixed requests, some preempted, with prefixes from slots and from the host.

    One live row has launches of its own.

    No chunk keeps the gap, so the smallest is taken.
    """
    monkeypatch.setattr(requests_lib, "launch_sizes", lambda slots: (1, slots))
    spec = replace(toy_spec(), prefill_chunk=128)
    more = {"prefixes": True, "cpu_prefix_cache_bytes": 1 << 18, "max_itl_ms": 1e-6}
    more |= {"logprobs": 2, "enable_penalties": True}
    with spec.engine(
        max_num_seqs=3, max_model_len=250, max_concurrent_prefills=2, adaptive=True, **more
    ) as engine:
        with pytest.warns(UserWarning, match="max_itl_ms=1e-06 cannot be kept: a chunk of 64"):
            engine.prepare()
        assert engine.engine.prompts.chunks == (64,)
        idle = engine.status
        assert idle == EngineStatus(0, 0, 0, 0, 3 * engine.runner.capacity, 0, 0, 0, 0, 0)
        assert not any(use.rounds for use in engine.trees)
        with compilations() as compiled:
            served(engine, mixed(20, seed=1, most=250))
            held = held_arrays()
            requests = mixed(40, seed=2, most=250)
            found = served(engine, requests)
            assert held_arrays() == held
        assert not compiled
        status = engine.status
        assert status.preemptions > 0 and status.prefix_hits > 0.1 * status.prefix_queries
        assert status.running == status.waiting == status.prefilling == status.tokens == 0
        assert 0 < status.host_bytes <= 1 << 18
        assert all(use.rounds for use in engine.trees)
        # Whatever else this process compiles, the engine's programs stay.
        with PROGRAMS.limited(0):
            pass
        adjusted = {"logit_bias": {3: 1.0}, "presence_penalty": 0.5, "repetition_penalty": 1.2}
        scored = {"logprobs": 2, "prompt_logprobs": True, "min_p": 0.1, "temperature": 1.0}
        with compilations() as compiled:
            served(
                engine,
                [
                    (prompt, {**options, **more})
                    for prompt, options in requests[:4]
                    for more in (adjusted, scored)
                ],
            )
            for named, use in enumerate(engine.trees):
                before = [one.rounds for one in engine.trees]
                engine.submit(TEXT[:20], tree=use.tree, max_new_tokens=16, eos_token_id=[])
                finished(engine)
                ran = [one.rounds - was for one, was in zip(engine.trees, before, strict=True)]
                # The last round before may be read now.
                assert ran.pop(named) > 2 and max(ran) <= 1
        assert not compiled
        with pytest.raises(ValueError, match="tree=9 is not one of this engine's trees, w.* n"):
            engine.submit("ab", tree=TreeConfig((9,)), max_new_tokens=2)
        engine.prepare()  # Once is enough.
    assert len(found) > 30
    assert_as_alone(spec, requests, found)


@pytest.mark.full
def test_a_hundred_requests_through_eight_slots() -> None:
    spec, requests = toy_spec(), mixed(100, seed=3, most=300)
    more = {"prefixes": True, "cpu_prefix_cache_bytes": 1 << 18}
    with spec.engine(
        max_num_seqs=8, max_model_len=300, max_concurrent_prefills=3, adaptive=True, **more
    ) as engine:
        found = served(engine, requests, seed=4)
        assert len(found) > 80 and engine.status.prefix_hits
    assert_as_alone(spec, requests, found)


def test_requests_that_cannot_be_served_are_refused() -> None:
    spec = toy_spec()
    with spec.engine(max_num_seqs=1, max_model_len=16) as engine:
        with pytest.raises(ValueError, match="a request is one row and 2 were given"):
            engine.submit([[1], [2]], max_new_tokens=2)
        with pytest.raises(ValueError, match="max_positions=16"):
            engine.submit([1] * 9, max_new_tokens=8)
        with pytest.raises(TypeError, match="unknown generation option"):
            engine.submit([1], colour=3)
        cancelled = engine.submit([1] * 4, max_new_tokens=9)
        engine.cancel(cancelled)
        assert not finished(engine)
        with pytest.raises(ValueError, match="priority='high' must be a whole number"):
            engine.submit([1], priority="high", max_new_tokens=2)
        with pytest.raises(ValueError, match="cache_salt=3 must be text"):
            engine.submit([1], cache_salt=3, max_new_tokens=2)  # type: ignore[arg-type]
    for name, option in serving.OPTIONS.items():
        for value in wrong(option.rule):
            with pytest.raises(Refused, match=f"^{name}=.* must be "):
                asked: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 9, name: value}
                spec.engine(**asked)
    wrong_names: list[tuple[dict[str, Any], str]] = [
        ({"max_num_seqs": 1}, "needs max_model_len"),
        ({"max_num_seq": 1}, "did you mean 'max_num_seqs'"),
    ]
    for given, said in wrong_names:
        with pytest.raises(TypeError, match=said):
            spec.engine(**given)
    contradictions: list[tuple[dict[str, Any], str]] = [
        ({"cpu_prefix_cache_bytes": 9}, "pass prefixes=True"),
        (
            {"prefixes": True, "cpu_prefix_cache_bytes": -1},
            "cpu_prefix_cache_bytes=-1 must be a whole",
        ),
        ({"max_itl_ms": 0}, "max_itl_ms=0 must be a number of milliseconds"),
    ]
    for options, said in contradictions:
        with pytest.raises(ValueError, match=said):
            spec.engine(max_num_seqs=1, max_model_len=9, **options)
    with spec.engine(max_num_seqs=1, max_model_len=9) as engine:
        engine.submit([1], max_new_tokens=2)
        with pytest.raises(RuntimeError, match=r"prepare\(\) comes before the first request"):
            engine.prepare()
    with pytest.raises(NotImplementedError, match="leave out offload, or prefixes"):
        replace(spec, offload=True).engine(max_num_seqs=1, max_model_len=9, prefixes=True)
