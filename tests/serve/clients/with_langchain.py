"""langchain-openai: structured output works or raises, and is never None."""

from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from tests.serve.clients.checks import PROMPT, Checks, run


class Answer(BaseModel):
    """What is asked for; a model that knows no JSON can only give the right one."""

    language: Literal["python", "c"]
    lines: Literal[1, 2, 3]


def checks(own: Checks) -> None:
    """All of them."""
    model, url, key = own.model["id"], f"{own.base_url}/v1", SecretStr(own.key)
    with own.check("completion and stream"):
        texts = OpenAI(model=model, base_url=url, api_key=key, max_tokens=12, seed=1)
        assert "".join(texts.stream(PROMPT)) == texts.invoke(PROMPT) != ""
    if not own.model["longspec"]["chat"]:
        return
    chat = ChatOpenAI(model=model, base_url=url, api_key=key, max_completion_tokens=12, seed=1)
    with own.check("chat, stream and batch"):
        whole = chat.invoke("Write a function.")
        assert whole.usage_metadata and whole.usage_metadata["output_tokens"] <= 12
        parts = [part.content for part in chat.stream("Write a function.")]
        assert "".join(map(str, parts)) == whole.content
        assert [each.content for each in chat.batch(["Write a function."] * 3)] == [
            whole.content
        ] * 3
    with own.check("structured output by json_schema works"):
        kept = ChatOpenAI(model=model, base_url=url, api_key=key, max_completion_tokens=60, seed=1)
        found = kept.with_structured_output(Answer, method="json_schema").invoke("Which? JSON.")
        assert isinstance(found, Answer), repr(found)
    for method in ("function_calling", "json_mode"):
        with own.check(f"structured output by {method} works or raises"):
            try:
                found = chat.with_structured_output(Answer, method=method).invoke("Who? JSON.")
            except Exception as error:
                print(f"{method}: {type(error).__name__}: {error}")
            else:
                assert isinstance(found, Answer), f"silently {found!r}"


if __name__ == "__main__":
    run("langchain-openai", checks)
