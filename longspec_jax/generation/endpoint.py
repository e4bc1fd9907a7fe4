"""A target behind an HTTP server, for work that needs texts and no arrays.

:class:`Endpoint` has what a loaded ``LongSpec`` has for such work, and answers
:meth:`Endpoint.generate` by requests to a server of ``infer.serve``, or to several behind one
address. Prompts are token ids, so that tokenizer and template are those of this side.
"""

import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

import numpy as np

from longspec_jax.checks import shown
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import PLAIN, TreeConfig

KEY = "LONGSPEC_API_KEY"
"""The environment variable with the server's API key."""
PATIENCE = 900.0
"""Seconds in which a server that is full or starting must have taken a request."""
LONGEST_ANSWER = 3600.0
"""Seconds that an answer may take."""
BUSY = (429, 503)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would send the key along, to whatever host is named."""

    def redirect_request(
        self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any
    ) -> None:
        """None: the redirect is an error of the request."""


_OPENER = urllib.request.build_opener(_NoRedirect)


class RequestOptions(TypedDict, total=False):
    """Options of a request that the rows of a call share, as of ``LongSpec.generate``."""

    eos_token_id: Sequence[int] | None
    tree: TreeConfig | None
    """The server chooses it, but for ``PLAIN``."""
    temperature: float | None
    top_k: int | None
    top_p: float | None


@dataclass(frozen=True)
class RemoteAnswer:
    """What a server says to one prompt."""

    tokens: tuple[int, ...]
    text: str
    drafted: tuple[bool, ...]
    target_passes: int
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class RemoteStats:
    """What the server says of the rows of a call."""

    target_passes: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class RemoteResult:
    """As of ``generate``, with an entry a row."""

    sequences: tuple[tuple[int, ...], ...]
    text: tuple[str, ...]
    drafted: tuple[tuple[bool, ...], ...]
    stats: RemoteStats


@dataclass(frozen=True, eq=False)
class Endpoint:
    """A target that a server runs."""

    url: str
    """Its address up to ``/v1``."""
    target_config: TargetConfig
    """Of the target, whose files are here."""
    tokenizer: Any = field(repr=False)
    stop_tokens: tuple[int, ...]
    """That end an answer, the target's own."""
    concurrency: int = 8
    """Requests at a time."""
    model: str = ""
    """The model's name there."""

    def reached(self) -> "Endpoint":
        """The same, with the name of the server's model.

        Raises:
          OSError: if the server does not answer.
        """
        found = replace(self, url=self.url.rstrip("/"))
        return replace(found, model=found._ask("/models")["data"][0]["id"])

    def answer(
        self,
        prompt: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int,
        seed: int = 0,
        **options: Unpack[RequestOptions],
    ) -> RemoteAnswer:
        """The text behind token ids; options as of ``LongSpec.generate``.

        Raises:
          OSError: for a server that cannot be reached, or stays busy.
          ValueError: for what it refuses.
        """
        stops = {}
        if (eos := options.get("eos_token_id")) is not None:
            stops = {"ignore_eos": True, "stop_token_ids": list(eos)}
        sampling = {name: options.get(name) for name in ("temperature", "top_k", "top_p")}
        speculation = {"speculation": False} if options.get("tree") == PLAIN else {}
        answer = self._ask(
            "/completions",
            {
                "model": self.model,
                **{name: value for name, value in sampling.items() if value is not None},
                **stops,
                "longspec": {"rounds": True, **speculation},
                "prompt": [*map(int, prompt)],
                "max_tokens": max_new_tokens,
                "seed": seed,
            },
        )
        choice = answer["choices"][0]
        if choice.get("finish_reason") == "error":
            said = choice.get("error", {}).get("message", "a text ended with an error")
            raise OSError(f"--endpoint={self.url}: {said}")
        tokens, times = answer["longspec"][0]["tokens"], answer["metrics"]
        return RemoteAnswer(
            tokens=tuple(one["id"] for one in tokens),
            text=choice["text"],
            drafted=tuple(one["drafted"] for one in tokens),
            target_passes=len(answer["longspec"][0]["rounds"]),
            prefill_seconds=(times["time_to_first_token_ms"] - times["queue_time_ms"]) / 1000,
            decode_seconds=(times["mean_itl_ms"] or 0.0) * (len(tokens) - 1) / 1000,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: Sequence[int],
        seed: int | Sequence[int],
        **options: Unpack[RequestOptions],
    ) -> RemoteResult:
        """The rows of a call, :attr:`concurrency` requests at a time; options as of :meth:`answer`.

        Raises:
          OSError, ValueError: as of :meth:`answer`.
        """
        seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
        with ThreadPoolExecutor(self.concurrency) as pool:
            asked = [
                pool.submit(self.answer, prompt, max_new_tokens=most, seed=own, **options)
                for prompt, most, own in zip(prompts, max_new_tokens, seeds, strict=True)
            ]
            try:
                answers = [each.result() for each in asked]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return RemoteResult(
            tuple(each.tokens for each in answers),
            tuple(each.text for each in answers),
            tuple(each.drafted for each in answers),
            RemoteStats(
                tuple(each.target_passes for each in answers),
                max(each.prefill_seconds for each in answers),
                max(each.decode_seconds for each in answers),
            ),
        )

    def score_gap(self, *_: Any, **__: Any) -> None:
        """Unknown: the logits are on the server."""

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of an answer; waits where the server is busy."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with _OPENER.open(request, timeout=LONGEST_ANSWER) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                if error.code not in BUSY or time.monotonic() > deadline:
                    raise self._refusal(error) from None
                time.sleep(_seconds(error.headers.get("Retry-After")))
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                raise OSError(
                    f"--endpoint={self.url}: {reason}; is it the address of a server, up to /v1?"
                ) from None

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        if 300 <= error.code < 400:
            return ValueError(
                f"--endpoint={self.url} redirects to {shown(error.headers.get('Location'))}, where "
                "neither prompts nor the API key are sent; name the server's own address, up to /v1"
            )
        said = ""
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            said = json.load(error)["error"]["message"]
        message = f"--endpoint={self.url} answers {error.code}: {said or error.reason}"
        if error.code == 401:
            return ValueError(f"{message}; put the key into the environment variable {KEY}")
        return OSError(message) if error.code >= 500 or error.code in BUSY else ValueError(message)


def _seconds(retry_after: str | None) -> float:
    """How long a server asks to wait; a second if it does not say."""
    try:
        return min(max(float(retry_after or 1), 0.0), 60.0)
    except ValueError:
        return 1.0
