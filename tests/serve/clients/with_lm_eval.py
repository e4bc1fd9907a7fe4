"""lm-evaluation-harness, ``local-completions``: its figures are those of transformers."""

import os
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM

from tests.serve.clients.checks import PROMPT, TOKENIZER, Checks, run

TEXTS = (
    (PROMPT, "\n    return n"),
    ("import os\nimport", " sys\n"),
    ("class Graph:\n    def __init__(self", ", data=None):"),
)
CLOSE = 1e-3


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    """Requests as tasks make them."""
    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=index)  # type: ignore[arg-type]
        for index, given in enumerate(arguments)
    ]


class Reference:
    """The same figures by transformers."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(TOKENIZER, dtype=torch.float32).eval()

    @torch.no_grad()
    def scored(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log-probability of a continuation, and whether it is the greedy one."""
        tokens = torch.tensor([context + continuation])
        logits = self.model(tokens).logits[0, len(context) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(continuation)
        greedy = bool((logits.argmax(-1) == wanted).all())
        return logits.gather(-1, wanted[:, None]).sum().item(), greedy

    @torch.no_grad()
    def greedy(self, context: list[int], count: int) -> list[int]:
        """Greedy tokens."""
        tokens = torch.tensor([context])
        given: Any = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1}
        return self.model.generate(tokens, **given)[0, len(context) :].tolist()


def checks(own: Checks) -> None:
    """All of them."""
    os.environ["OPENAI_API_KEY"] = own.key
    client: Any = LocalCompletionsAPI(
        model=own.model["id"],
        base_url=f"{own.base_url}/v1/completions",
        tokenizer=str(TOKENIZER),
        tokenizer_backend="huggingface",
        num_concurrent=2,
        max_length=own.model["max_model_len"],
        max_retries=1,
    )
    reference = Reference()
    with own.check("loglikelihood"):
        told = client.loglikelihood(instances("loglikelihood", list(TEXTS)))
        for (context, continuation), (value, greedy) in zip(TEXTS, told, strict=True):
            wanted, is_greedy = reference.scored(*client._encode_pair(context, continuation))
            assert abs(value - wanted) < CLOSE, (value, wanted)
            assert greedy == is_greedy
    with own.check("loglikelihood_rolling"):
        texts = ["".join(pair) for pair in TEXTS]
        requests = instances("loglikelihood_rolling", [(text,) for text in texts])
        for text, value in zip(texts, client.loglikelihood_rolling(requests), strict=True):
            tokens = client.tok_encode(text)
            wanted, _ = reference.scored([client.prefix_token_id], tokens)
            assert abs(value - wanted) < CLOSE, (value, wanted)
    with own.check("generate_until"):
        options = {"until": ["\n\n"], "max_gen_toks": 24, "temperature": 0.0}
        requests = instances("generate_until", [(context, options) for context, _ in TEXTS])
        for (context, _), text in zip(TEXTS, client.generate_until(requests), strict=True):
            tokens = reference.greedy(client.tok_encode(context), 24)
            wanted = client.tokenizer.decode(tokens, skip_special_tokens=True)
            assert text == wanted.split("\n\n")[0], (text, wanted)


if __name__ == "__main__":
    run("lm_eval", checks)
