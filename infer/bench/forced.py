"""What a draft and its target think of a text that is given: rounds whose outcome is forced.

Every round proposes and verifies as in decoding, but the next token of the given text is committed
in the place of the target's draw. So the draft is asked about every token of the text with the
very state that it would have had, had the target written it.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding import engine
from longspec_jax.decoding.prefill import prefill
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.rows import Request, Rows
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, Params, SamplingNoise
from longspec_jax.drafters.tree import AcceptedPath


class Verdict(NamedTuple):
    """What a model thinks of given tokens."""

    right: Any
    """``[B, n]`` whether each was its likeliest."""
    log_probabilities: Any
    """``[B, n]`` of each."""


@dataclass(frozen=True)
class _Listening(SamplingNoise):
    """SamplingNoise at temperature 0 that note the logits they are asked about."""

    greedy: RoundNoise
    heard: list[Array] = field(default_factory=list)

    def scores(self, logits: Array, depth: int) -> Array:
        self.heard.append(logits)
        return self.greedy.scores(logits, depth)

    def draw(self, logits: Array, depths: Array) -> Array:
        return self.greedy.draw(logits, depths)

    def among(self, tokens: Array) -> "_Listening":
        return self

    def after(self, steps: Array, levels: int) -> SamplingNoise:
        return self.greedy.after(steps, levels)


def forced(
    target: CachedTarget,
    drafter: Drafter,
    params: Params,
    prompts: np.ndarray,
    answers: np.ndarray,
    chunk: int,
) -> tuple[Verdict, Verdict]:
    """What draft and target think of answers, token by token.

    Args:
      target: the target.
      drafter: of a chain of one token.
      params: parameters of both.
      prompts: ``[B, P]`` all of one length.
      answers: ``[B, n]`` what follows.
      chunk: tokens of a prefill step; the cache is of whole chunks.

    Returns:
      The draft's verdict, and the target's.
    """
    batch, answered = answers.shape
    # The prompt's last token is the first pending one.
    committed = prompts.shape[1] - 1
    room = committed + answered + engine.slack_slots(drafter.tree.num_levels)
    request = Request(
        Sampling.greedy(batch),
        jnp.full((batch, 1), -1),
        jnp.full((batch,), answered + 1, jnp.int32),
    )
    state = prefill(
        target,
        drafter,
        params,
        prompts[:, :-1],
        np.full(batch, committed, np.int32),
        request,
        capacity=-(-room // chunk) * chunk,
        max_emitted=1,
        chunk=chunk,
    )
    rows = replace(state.rows, pending=jnp.asarray(prompts[:, -1], jnp.int32))
    found = []
    for token in np.asarray(answers, np.int32).T:
        rows, verdicts = _round(target, drafter, params, rows, jnp.asarray(token))
        found.append(jax.device_get(verdicts))
    draft, own = jax.tree.map(lambda *tokens: np.stack(tokens, axis=1), *found)
    return draft, own


@functools.partial(jax.jit, static_argnames=("target", "drafter"))
def _round(
    target: CachedTarget, drafter: Drafter, params: Params, rows: Rows, token: Array
) -> tuple[Rows, tuple[Verdict, Verdict]]:
    """One round that commits the pending token and makes the given one pending."""
    greedy = engine.sampling_noise(target, drafter, rows)
    listening = _Listening(greedy)
    rows = engine.look_at_cache(target, drafter, params, rows)
    tree = engine.propose_tree(target, drafter, params, rows, listening)
    verified, _ = engine.verify_tree(target, drafter, params, rows, tree, greedy)
    once = jnp.ones_like(token)
    accepted_path = AcceptedPath((once - 1)[:, None], token[:, None], once)
    after, _ = engine.commit_accepted(drafter, params, rows, verified, accepted_path)
    return after, (_of(listening.heard[0][:, 0], token), _of(verified.logits[:, 0], token))


def _of(logits: Array, token: Array) -> Verdict:
    """Whether a token is the likeliest, and its log-probability: of one token a row."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    own = jnp.take_along_axis(logs, token[:, None], axis=1)[:, 0]
    return Verdict(jnp.argmax(logits, axis=1) == token, own)
