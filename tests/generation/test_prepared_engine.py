"""What one prepared engine serves: log-probabilities, trees, plain rows, grammars; and calls."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from longspec_jax.decoding.logprobs import PromptLogprobs, TokenLogprob
from longspec_jax.generation import chat as chat_lib
from longspec_jax.generation.grammar import Grammar
from longspec_jax.generation.requests import RequestEngine
from longspec_jax.generation.result import StreamRound
from longspec_jax.generation.text import RequestOutput
from tests.generation.test_requests import finished
from tests.infer.toys import save_toy, toy_spec
from tests.kit import compilations

PROMPT = [3, 5, 1, 9, 2, 2, 7] * 6
"""Longer than a chunk of a prompt."""


@pytest.fixture(scope="module")
def engine() -> Iterator[RequestEngine]:
    every: dict[str, Any] = dict(
        logprobs=20, enable_penalties=True, return_trees=True, grammars=True
    )
    with toy_spec().engine(max_num_seqs=2, max_model_len=96, **every) as made:
        made.prepare()
        yield made


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The target as Hugging Face's model."""
    target, _ = save_toy(Path(tmp_path_factory.mktemp("toy")))
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def ran(engine: RequestEngine, *options: dict[str, Any]) -> list[list[RequestOutput]]:
    """The outputs of requests side by side."""
    ids = [engine.submit(PROMPT, eos_token_id=[], **{"max_new_tokens": 12, **o}) for o in options]
    outputs = finished(engine)
    return [outputs[id] for id in ids]


def joined(outputs: list[RequestOutput], name: str) -> tuple[Any, ...]:
    return sum((getattr(output, name) for output in outputs), ())


def check(found: tuple[TokenLogprob | None, ...], tokens: Any, expected: Any, count: int) -> None:
    """Against the log-softmax of the logits before each token."""
    assert len(found) == len(tokens)
    for one, token, row in zip(found, tokens, expected, strict=True):
        assert one is not None and one.logprob == pytest.approx(row[token], abs=1e-4)
        ids, values = [id for id, _ in one.top], [value for _, value in one.top]
        assert len(ids) == count and values == sorted(values, reverse=True)
        np.testing.assert_allclose(values, np.sort(row)[::-1][:count], atol=1e-4)
        assert ids[:1] == [int(np.argmax(row))][:count]
        # Equal floats: clients compare the token with the best one.
        assert dict(one.top).get(token, one.logprob) == one.logprob


def test_logprobs_are_those_of_hugging_face(
    engine: RequestEngine, oracle: Any, grammar: Grammar
) -> None:
    """The target's own, whatever is drawn from them; also next to a request that asks for none."""
    options = [
        {"logprobs": 5, "prompt_logprobs": 3},
        {"logprobs": 2, "temperature": 1.0, "top_k": 7, "seed": 3, "presence_penalty": 1.0},
        {"temperature": 1.0, "seed": 4},
        {"logprobs": 0, "prompt_logprobs": True, "temperature": 0.9},
        {"logprobs": 20, "speculate": False},
    ]
    formed: list[dict[str, Any]] = [{"temperature": 1.0}, {"speculate": False}]
    with compilations() as compiled:
        found = ran(engine, *options)
        texts(engine, [engine.submit("ab c", grammar=grammar, **REQUESTS[0] | o) for o in formed])
    assert not compiled, "all of it was prepared"
    for outputs, each in zip(found, options, strict=True):
        tokens = joined(outputs, "tokens")
        with torch.no_grad():
            logits = oracle(torch.tensor([[*PROMPT, *tokens]])).logits[0]
        expected = torch.log_softmax(logits, dim=-1).numpy()
        logprobs = joined(outputs, "logprobs")
        if "logprobs" in each:
            check(logprobs, tokens, expected[len(PROMPT) - 1 : -1], min(each["logprobs"], 17))
        else:
            assert not logprobs
        of_prompt, *others = (output.prompt_logprobs for output in outputs)
        assert others == [None] * len(others)
        if "prompt_logprobs" in each:
            assert isinstance(of_prompt, PromptLogprobs), "unpacked by who reads them"
            assert of_prompt[0] is None
            count = int(each["prompt_logprobs"]) if each["prompt_logprobs"] is not True else 0
            check(of_prompt[1:], PROMPT[1:], expected[: len(PROMPT) - 1], count)
        else:
            assert of_prompt is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_does_not_speculate_has_the_same_text(
    engine: RequestEngine, temperature: float
) -> None:
    options = {"temperature": temperature, "seed": 8, "max_new_tokens": 20}
    speculative, plain = ran(engine, options, {**options, "speculate": False})
    assert joined(plain, "tokens") == joined(speculative, "tokens")
    assert joined(plain, "rounds") == (0,) * 19 and not any(joined(plain, "drafted"))
    assert sum(joined(speculative, "rounds")) > 0


def test_the_trees_of_an_output_are_those_of_its_rounds(engine: RequestEngine) -> None:
    for outputs in ran(engine, {"temperature": 1.0}, {"speculate": False}):
        tokens, at = joined(outputs, "tokens"), 0
        assert len(joined(outputs, "trees")) == len(joined(outputs, "rounds")) > 0
        for tree, accepted in zip(joined(outputs, "trees"), joined(outputs, "rounds"), strict=True):
            assert tree.tokens[0] == tokens[at] and tree.parents[0] == -1 and tree.path[0] == 0
            for above, node in zip(tree.path, tree.path[1:], strict=False):
                assert tree.parents[node] == above and tree.tokens[node] == tree.draws[above]
            emitted = tuple(tree.draws[node] for node in tree.path)[: len(tokens) - at - 1]
            assert tokens[at + 1 : at + 1 + len(emitted)] == emitted
            assert accepted in (len(tree.path) - 1, len(emitted))
            at += len(emitted)
        assert at == len(tokens) - 1


def test_a_call_reports_the_logprobs_of_its_rows() -> None:
    spec, prompts = toy_spec(), [PROMPT, PROMPT[:5]]
    options: Any = {"max_new_tokens": 9, "eos_token_id": [], "temperature": [0.0, 1.0]}
    options |= {"logprobs": [None, 4], "prompt_logprobs": [2, False]}
    rounds: list[StreamRound] = []
    tree = spec.generate(prompts, **options, on_round=rounds.append)
    plain = spec.generate(prompts, **options, tree="none")
    assert tree.sequences == plain.sequences
    assert tree.logprobs[0] == () and len(tree.logprobs[1]) == 9
    assert tree.prompt_logprobs[1] is None
    first, *others = tree.prompt_logprobs[0] or ()
    assert first is None and len(others) == len(PROMPT) - 1
    for one, other in zip(tree.logprobs[1], plain.logprobs[1], strict=True):
        assert [id for id, _ in one.top] == [id for id, _ in other.top]
        np.testing.assert_allclose(one.logprob, other.logprob, atol=3e-5)
    assert sum((each.logprobs[1] for each in rounds), ()) == tree.logprobs[1]


def test_what_an_engine_was_not_made_for_is_refused() -> None:
    with toy_spec().engine(max_num_seqs=1, max_model_len=32, logprobs=3) as engine:
        with pytest.raises(ValueError, match="4 alternatives .* made with logprobs=3; make the"):
            engine.submit([1], logprobs=4, max_new_tokens=2)
        with pytest.raises(ValueError, match="make the engine with enable_penalties=True"):
            engine.submit([1], repetition_penalty=1.2, max_new_tokens=2)
    with toy_spec().engine(max_num_seqs=1, max_model_len=32) as engine:
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(ValueError, match="made without them; make .* with logprobs=20"):
                engine.submit([1], **{"max_new_tokens": 2, name: 1})
    with pytest.raises(ValueError, match="logprobs=21 must be a whole number from 0 to 20"):
        toy_spec().engine(max_num_seqs=1, max_model_len=32, logprobs=21)


PATTERN = "(ab|cd){5,30}(gh)?"
REQUESTS = [
    {"temperature": temperature, "seed": seed, "max_new_tokens": 50}
    for temperature, seed in ((0.0, 0), (1.0, 1), (1.0, 2))
]


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    return toy_spec().grammar(regex=PATTERN)


def texts(engine, ids: list[int], steps: int | None = None) -> tuple[list[str], int]:
    """The texts of some requests, run to their ends, and how many draft tokens were accepted."""
    found, accepted = dict.fromkeys(ids, ""), 0
    while engine.busy:
        for output in engine.step():
            found[output.id] += output.text
            accepted += sum(output.drafted)
            assert output.finish in (None, "stop", "length")
    return list(found.values()), accepted


def test_texts_satisfy_their_grammar_and_are_those_of_plain_decoding(engine, grammar) -> None:
    """Beside rows without a grammar, whose texts are their own."""
    free = [engine.submit("ab c", **options) for options in REQUESTS]
    alone, _ = texts(engine, free)
    ids = []
    for options in REQUESTS:
        ids.append(engine.submit("ab c", grammar=grammar, **options))
        ids.append(engine.submit("ab c", grammar=grammar, speculate=False, **options))
        ids.append(engine.submit("ab c", **options))
    found, accepted = texts(engine, ids)
    assert accepted > 0
    assert found[0::3] == found[1::3] and found[2::3] == alone
    assert all(re.fullmatch(PATTERN, text) for text in found[0::3])


def test_a_request_that_loses_its_slot_goes_on_in_its_grammar(engine, grammar) -> None:
    options = REQUESTS[1]
    [text], _ = texts(engine, [engine.submit("ab c", grammar=grammar, **options)])
    ids = [engine.submit("ab c", grammar=grammar, priority=1, **options) for _ in range(2)]
    before, gained = engine.status.preemptions, dict.fromkeys(ids, "")
    while not all(gained.values()):
        for output in engine.step():
            gained[output.id] += output.text
    urgent = engine.submit("gh", max_new_tokens=3)
    [_, *rest], _ = texts(engine, [urgent, *ids])
    assert engine.status.preemptions == before + 1
    assert [gained[id] + more for id, more in zip(ids, rest, strict=True)] == [text] * 2


def test_a_grammar_is_refused_behind_messages_that_open_the_reasoning(engine, grammar) -> None:
    talk = [{"role": "user", "content": "ab"}]
    template = "{{ messages[0].content }}cd"
    options: Any = {"grammar": grammar, "max_new_tokens": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_lib, "OPEN_THOUGHT", re.compile(r"(cd)\Z"))  # The toy has no bracket.
        with pytest.raises(ValueError, match="ends the prompt with cd, so that a form"):
            engine.submit(talk, chat_template=template, **options)
        assert not engine.busy
        texts(engine, [engine.submit("abcd", **options)])


def test_an_engine_refuses_what_it_was_not_made_for(engine, grammar) -> None:
    with (
        toy_spec().engine(max_num_seqs=1, max_model_len=64) as other,
        pytest.raises(ValueError, match="grammars=True"),
    ):
        other.submit("a", grammar=grammar, max_new_tokens=2)
    with pytest.raises(ValueError, match="eos_token_id does not name"):
        engine.submit("a", grammar=grammar, max_new_tokens=2, eos_token_id=[])
