"""Requests over an engine: each gets the text that a call of its own gets."""

from collections import defaultdict

import pytest

from longspec_jax.generation.requests import RequestEngine, RequestOutput
from tests.infer.toys import toy_spec
from tests.kit import compilations

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
    with spec.engine(slots=2, max_tokens=64) as engine:
        ids = [engine.submit(*one, **more) for *one, more in zip(PROMPTS, OPTIONS, strict=True)]
        outputs = finished(engine)
        for id, prompt, options in zip(ids, PROMPTS, OPTIONS, strict=True):
            alone = spec.generate(prompt, **options)
            parts = outputs[id]
            assert sum((part.tokens for part in parts), ()) == alone.sequences[0]
            assert "".join(part.text for part in parts) == alone.text[0]
            assert [part.finish for part in parts[:-1]] == [None] * (len(parts) - 1)
            full = len(alone.sequences[0]) == options["max_new_tokens"]
            assert parts[-1].finish == "length" if full else "stop"
        assert sum(use.rounds for use in engine.trees) > 0


def test_what_was_prepared_compiles_nothing_later() -> None:
    with toy_spec().engine(slots=3, max_tokens=64) as engine:
        engine.prepare()
        with compilations() as found:
            for prompt, options in zip(PROMPTS, OPTIONS, strict=True):
                engine.submit(prompt, **options)
            assert len(finished(engine)) == len(PROMPTS)
        assert not found


def test_requests_that_cannot_be_served_are_refused() -> None:
    spec = toy_spec()
    with spec.engine(slots=1, max_tokens=16) as engine:
        with pytest.raises(ValueError, match="a request is one row and 2 were given"):
            engine.submit([[1], [2]], max_new_tokens=2)
        with pytest.raises(ValueError, match="max_positions=16"):
            engine.submit([1] * 9, max_new_tokens=8)
        with pytest.raises(TypeError, match="unknown generation option"):
            engine.submit([1], colour=3)
        cancelled = engine.submit([1] * 4, max_new_tokens=9)
        engine.cancel(cancelled)
        assert not finished(engine)
    with pytest.raises(ValueError, match="slots"):
        spec.engine(slots=0, max_tokens=9)
