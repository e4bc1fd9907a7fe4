"""litellm, which proxies and agents use: completions, streams and its classes of errors."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # It asks the web for prices otherwise.
import litellm  # noqa: E402

from tests.serve.clients.checks import PROMPT, Checks, run  # noqa: E402


def checks(own: Checks) -> None:
    """All of them."""
    model = own.model["id"]
    asked: Any = {"api_base": f"{own.base_url}/v1", "api_key": own.key, "max_retries": 0}
    with own.check("text completion"):
        told = litellm.text_completion(
            model=f"text-completion-openai/{model}", prompt=PROMPT, max_tokens=12, seed=1, **asked
        )
        assert told.choices[0].text and told.usage.completion_tokens == 12
    messages = [{"role": "user", "content": "Write a function."}]
    given: Any = {"model": f"openai/{model}", "messages": messages, "max_tokens": 12, **asked}
    if own.model["longspec"]["chat"]:
        with own.check("chat, whole and as a stream"):
            whole = litellm.completion(seed=2, **given)
            parts = litellm.completion(seed=2, stream=True, **given)
            text = "".join(part.choices[0].delta.content or "" for part in parts)
            assert text == (whole.choices[0].message.content or "")
    with own.check("a prompt that is too long has a class of its own"):
        try:
            litellm.completion(
                **{**given, "messages": [{"role": "user", "content": "word " * 5000}]}
            )
        except litellm.ContextWindowExceededError:
            pass
        else:
            raise AssertionError("it was taken")
    with own.check("what is not supported is refused"):
        try:
            litellm.completion(**given, response_format={"type": "image"})
        except litellm.BadRequestError:
            pass
        else:
            raise AssertionError("it was taken")


if __name__ == "__main__":
    run("litellm", checks)
