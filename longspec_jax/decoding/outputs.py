"""What an engine tells its scheduler: what requests have gained, and what it holds."""

from dataclasses import dataclass

import numpy as np

from longspec_jax.decoding.logprobs import TokenLogprob
from longspec_jax.decoding.report import RoundTree


@dataclass(frozen=True)
class StepOutput:
    """What a request has gained: its first token from the prefill, or the tokens of a launch."""

    id: int
    """The request's, as :meth:`~longspec_jax.decoding.engine.Engine.submit` returned it."""
    tokens: np.ndarray
    """``[n]`` int32, at least one."""
    drafted: np.ndarray
    """``[n]`` whether each token was an accepted draft token."""
    rounds: tuple[int, ...]
    """Accepted draft tokens of every round that the request took part in; none of the prefill."""
    finish: str | None = None
    """None while the request runs. ``stop`` after a stop token, ``length`` at the budget, ``error``
    where the target's logits were not finite, so that the last token is no token."""
    cached: int = 0
    """Of the first output: tokens of the prompt that were not prefilled anew."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of every token; empty if the request does not ask."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Of the first output: of every token of the prompt but the first one, which has none. None if
    the request does not ask."""
    trees: tuple[RoundTree, ...] = ()
    """Of every round, where the engine reports them."""


@dataclass(frozen=True)
class EngineStatus:
    """What an engine does now, and has done."""

    running: int
    """Requests that hold a slot."""
    waiting: int
    """Requests in the queue."""
    prefilling: int
    """Requests whose prompts are under way, or wait for a slot."""
    tokens: int
    """Of the running requests, prompt and text, as far as they were read."""
    capacity: int
    """Tokens that all slots hold."""
    prefix_queries: int
    """Tokens of all prompts since the start."""
    prefix_hits: int
    """How many of them were not prefilled anew."""
    host_bytes: int
    """Of chunks in the host's memory."""
    preemptions: int
    """Requests that lost a slot, or a place among the prefills, to a better one."""
    recoveries: int
    """Faults behind which the engine went on."""
