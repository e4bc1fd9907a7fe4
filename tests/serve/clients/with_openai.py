"""The openai client: every endpoint, streams, errors, cancellation, acceptance."""

import asyncio
import re
from typing import Any

import openai

from tests.serve.clients.checks import PROMPT, Checks, run


def checks(own: Checks) -> None:
    """All of them."""
    client = openai.OpenAI(base_url=f"{own.base_url}/v1", api_key=own.key, max_retries=0)
    model = own.model["id"]
    asked: Any = {"model": model, "max_tokens": 24, "temperature": 0.7, "seed": 3}
    with own.check("models"):
        assert [each.id for each in client.models.list()] == [model]
        assert client.models.retrieve(model).id == model
    with own.check("completion of a text, with acceptance"):
        whole = client.completions.create(prompt=PROMPT, **asked)
        assert whole.usage is not None and whole.usage.completion_tokens == 24
        assert whole.choices[0].finish_reason == "length" and whole.choices[0].text
        figures = (whole.model_extra or {})["metrics"]["speculative_decoding"]
        assert figures["num_spec_steps"] <= 23
        assert figures["num_accepted_draft_tokens"] + figures["num_spec_steps"] >= 23
    with own.check("the stream of the same seed has the same text"):
        given = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(prompt=PROMPT, **asked, **given))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert text == client.completions.create(prompt=PROMPT, **asked).choices[0].text
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
        assert (chunks[-1].model_extra or {})["metrics"]["speculative_decoding"]
    with own.check("without speculation the text is the same"):
        plain = {"longspec": {"speculation": False}}
        texts = [
            client.completions.create(prompt=PROMPT, **asked, extra_body=extra).choices[0].text
            for extra in ({}, plain)
        ]
        assert texts[0] == texts[1]
    with own.check("batches of texts and of token ids, n"):
        both = client.completions.create(prompt=[PROMPT, "import os"], n=2, **asked)
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        ids = client.completions.create(prompt=[[40, 41, 42], [43, 44]], **asked)
        assert len(ids.choices) == 2
    with own.check("log-probabilities, echo"):
        told = client.completions.create(prompt=PROMPT, logprobs=2, echo=True, **asked)
        scored = told.choices[0].logprobs
        assert told.choices[0].text.startswith(PROMPT)
        assert scored and scored.token_logprobs and scored.token_logprobs[0] is None
        assert len(scored.token_logprobs) == told.usage.total_tokens
    with own.check("stop strings, penalties, biases, min_p"):
        stopped = client.completions.create(prompt=PROMPT, stop=["\n\n", "return"], **asked)
        assert "return" not in stopped.choices[0].text
        client.completions.create(
            prompt=PROMPT,
            **asked,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={"40": -5},
            extra_body={"min_p": 0.05, "top_k": 20, "repetition_penalty": 1.1},
        )
    if own.model["longspec"]["chat"]:
        chat(own, client, model)
    refused(own, client, model)
    with own.check("a stream that is left is ended"):
        long: Any = {"model": model, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(prompt=PROMPT, stream=True, **long)
        next(iter(stream))
        assert own.get("/stats")["running"] >= 1
        stream.close()
        own.becomes_idle(5)
    with own.check("sixteen requests at once have the texts that they have alone"):
        asyncio.run(at_once(own, client, asked))


def chat(own: Checks, client: openai.OpenAI, model: str) -> None:
    """Messages."""
    parts = [{"type": "text", "text": "Write a function."}]
    messages: Any = [
        {"role": "developer", "content": "Answer in Python."},
        {"role": "user", "content": parts},
    ]
    asked: Any = {"model": model, "messages": messages, "max_completion_tokens": 16, "seed": 1}
    with own.check("chat, whole and as a stream"):
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.role == "assistant"
        stream = client.chat.completions.create(**asked, stream=True)
        deltas = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
        assert "".join(deltas) == (whole.choices[0].message.content or "")
    with own.check("chat with log-probabilities"):
        told = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
        scored = told.choices[0].logprobs
        assert scored and scored.content and len(scored.content[0].top_logprobs) == 3
    with own.check("a JSON schema and a regular expression, with and without speculation"):
        choice = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        schema = {"name": "choice", "schema": {**choice, "additionalProperties": False}}
        shapes: list[Any] = [
            {"type": "json_schema", "json_schema": schema},
            {"type": "regex", "regex": "[a-c]{4}"},
        ]
        for shape, pattern in zip(
            shapes, (r'\s*\{\s*"n"\s*:\s*[12]\s*\}', "[a-c]{4}"), strict=True
        ):
            texts = set()
            for speculation in (True, False):
                extra = {"longspec": {"speculation": speculation}, "response_format": shape}
                given = {**asked, "max_completion_tokens": 60, "extra_body": extra}
                told = client.chat.completions.create(**given).choices[0]
                assert told.finish_reason == "stop", told
                assert re.fullmatch(pattern, told.message.content or ""), told
                texts.add(told.message.content)
            assert len(texts) == 1, texts
    with own.check("the helper .stream() says that the length was reached"):
        try:
            with client.chat.completions.stream(**asked) as events:
                final = events.get_final_completion()
            assert final.choices[0].finish_reason in ("stop", "length")
        except openai.LengthFinishReasonError:
            pass


def refused(own: Checks, client: openai.OpenAI, model: str) -> None:
    """Errors of the classes that the client has for them."""
    cases: list[tuple[str, type[openai.APIStatusError], dict[str, Any]]] = [
        ("a wrong temperature", openai.BadRequestError, {"temperature": -1}),
        ("an unknown model", openai.NotFoundError, {"model": "nobody"}),
        ("a prompt that is too long", openai.BadRequestError, {"prompt": "word " * 5000}),
        ("an unknown field", openai.BadRequestError, {"extra_body": {"flavour": "mint"}}),
        ("best_of", openai.BadRequestError, {"best_of": 3}),
    ]
    for name, kind, given in cases:
        with own.check(f"{name} is refused"):
            try:
                client.completions.create(**{"model": model, "prompt": PROMPT, **given})
            except kind as error:
                assert error.body and {"message", "type", "param", "code"} <= set(error.body)
            else:
                raise AssertionError("it was taken")


async def at_once(own: Checks, client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """Two requests for each of eight seeds."""
    several = openai.AsyncOpenAI(base_url=f"{own.base_url}/v1", api_key=own.key, max_retries=0)
    seeds = [*range(8)] * 2
    answers = await asyncio.gather(
        *(several.completions.create(prompt=PROMPT, **{**asked, "seed": seed}) for seed in seeds)
    )
    texts = [answer.choices[0].text for answer in answers]
    assert texts[:8] == texts[8:]
    alone = client.completions.create(prompt=PROMPT, **{**asked, "seed": 5}).choices[0].text
    assert alone == texts[5]


if __name__ == "__main__":
    run("openai", checks)
