"""Is the output that of plain decoding, and if not, how close was the call?

In float32 the answer must be yes. In bfloat16 and float16 differently shaped reductions may flip a
near-tie; the gap between the two candidates at the first divergence says whether that is all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.sampling import noise, perturb
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Params
from longspec_jax.generation import runner
from longspec_jax.generation.activity import Compiling, DecodingPlainly, OnActivity
from longspec_jax.generation.collect import collect, follow
from longspec_jax.generation.job import Job
from longspec_jax.generation.memory import free_bytes
from longspec_jax.generation.progress import Run, Timing
from longspec_jax.generation.result import GenerateResult, StreamRound
from longspec_jax.generation.runner import Begin, Ready, WarmShapes
from longspec_jax.ops.partitioned import use_mesh


@dataclass(frozen=True)
class Divergence:
    """The first token of a row that differs from plain decoding."""

    row: int
    index: int
    """Index among the row's emitted tokens."""
    plain_token: int | None
    """None if plain decoding ended before this token."""
    speculative_token: int | None
    gap: float | None
    """Plain decoding's score of its token minus that of the other, noise and temperature included:
    how far from a tie the draw was. None where there are no logits to tell, or filters left out one
    of the two."""


@dataclass(frozen=True)
class Comparison:
    """A speculative and a plain run of the same call."""

    speculative: GenerateResult
    plain: GenerateResult
    divergences: tuple[Divergence, ...]
    """The first of every row that has one."""

    @property
    def identical(self) -> bool:
        """Whether every token of every row is the same."""
        return not self.divergences

    @property
    def speedup(self) -> float:
        """Decoding speed with speculation over that without."""
        speculative, plain = self.speculative.stats, self.plain.stats
        return speculative.tokens_per_second / plain.tokens_per_second


def run_both(
    begin: Begin,
    warm: WarmShapes,
    tokenizer: Any,
    on_round: Callable[[StreamRound], None] | None = None,
    on_activity: OnActivity | None = None,
) -> Comparison:
    """Run a call with speculation and without, and find every row's first divergence.

    Both begin with copies of one prefill, which knows no drafter, where memory takes two caches.
    Both are run in the same way, round by round if someone listens, so that their seconds compare.
    A call that decodes plainly is its own comparison.

    Args:
      begin: makes the speculative call ready.
      warm: the shapes compiled so far.
      tokenizer: a transformers tokenizer, or None for no text.
      on_round: called with every round of the speculative run as it ends.
      on_activity: told what is done while no round ends.
    """
    streams = on_round is not None
    start = begin(streams)
    job, plain_job = start.job, start.job.without_draft()
    if not job.drafter.tree.widths:
        plain = collect(job, follow(start, tokenizer, on_round), tokenizer)
        return Comparison(plain, plain, ())
    plain_start = None
    if isinstance(start, Ready) and _room_for_two(job):
        if on_activity and not warm.knows(plain_job, streams):
            on_activity(Compiling())
        compiled = warm.prepare(plain_job, streams)
        copy = jax.tree.map(jnp.copy, runner.state_for(plain_job, start))
        plain_start = Ready(plain_job, copy, Timing(compiled, start.timing.prefill))
    run = follow(start, tokenizer, on_round)
    speculative = collect(job, run, tokenizer)
    del run, start  # The cache makes room for plain decoding's.
    if plain_start is None:
        plain_start = runner.ready(plain_job, warm, streams=streams, on_activity=on_activity)
    listener = _plain_listener(plain_job, on_activity)
    plain_run = follow(plain_start, None, listener if streams else None)
    plain = collect(plain_job, plain_run, tokenizer)
    pairs = enumerate(zip(plain.sequences, speculative.sequences, strict=True))
    found = (_divergence(plain_job, plain_run, row, pair) for row, pair in pairs)
    return Comparison(speculative, plain, tuple(item for item in found if item is not None))


def _room_for_two(job: Job) -> bool:
    """Whether the device holds a second cache beside the first; the host is not asked to."""
    if job.target.offload:
        return False
    free = free_bytes()
    return free is None or free > job.memory.cache_bytes + job.memory.working_bytes


def _plain_listener(job: Job, on_activity: OnActivity | None) -> Callable[[StreamRound], None]:
    """What follows the plain run, and reports how far it has got."""
    total = int(job.request.max_new_tokens.sum())
    tell = on_activity or (lambda activity: None)
    tell(DecodingPlainly(0, total))
    return lambda added: tell(DecodingPlainly(sum(added.stats.new_tokens), total))


def score_gap(start: Ready, last: int, plain: int, other: int) -> float | None:
    """How much plain decoding's scores prefer one next token of a single row to another.

    Args:
      start: the row, prefilled up to its last token.
      last: that token.
      plain: the token that is preferred.
      other: the one it is compared with.

    Returns:
      The difference, noise and temperature included; None if filters left out one of the two.
    """
    job = start.job
    return _gap(job, start.state.rows.cache, [last], [len(job.prompts[0])], 0, (plain, other))


def _gap(
    job: Job,
    cache: KVCache,
    last: Sequence[int],
    length: Sequence[int],
    row: int,
    pair: tuple[int, int],
) -> float | None:
    """How far the scores of a row prefer one next token to another; None if one has none.

    Args:
      job: the plain call.
      cache: of all its rows.
      last: the token before, of each row.
      length: its position.
      row: the one in question.
      pair: the preferred token and the other one.
    """
    places = jnp.asarray(last), jnp.asarray(length)
    scores = _scores(job.target, job.params, job.request, cache, *places)[row]
    gap = float(scores[pair[0]] - scores[pair[1]])
    return gap if math.isfinite(gap) else None


def first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Index of the first entry that differs; None if the sequences are equal."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _divergence(
    job: Job, run: Run, row: int, pair: tuple[tuple[int, ...], tuple[int, ...]]
) -> Divergence | None:
    """The first token of a row where the plain and the speculative sequence part."""
    index = first_difference(*pair)
    if index is None:
        return None
    plain, other = (tokens[index] if index < len(tokens) else None for tokens in pair)
    gap = None
    # The first token is drawn from the prefill, which both share and which keeps no logits. Where
    # rows flow, the cache of this one is another's by now.
    if index > 0 and not job.flows and plain is not None and other is not None:
        before = [tokens[min(index, len(tokens)) - 1] for tokens in _sequences(run)]
        length = [len(prompt) + index - 1 for prompt in job.prompts]
        gap = _gap(job, run.rows.cache, before, length, row, (plain, other))
    return Divergence(row, index, plain, other, gap)


def _sequences(run: Run) -> list[list[int]]:
    emitted = zip(run.progress.output, run.progress.emitted, strict=True)
    return [row[:count].tolist() for row, count in emitted]


@program(static_argnames=("target",))
def _scores(
    target: CachedTarget,
    params: Params,
    request: Request,
    cache: KVCache,
    tokens: Array,
    length: Array,
) -> Array:
    """What the draw behind ``tokens[b]`` at position ``length[b]`` takes the argmax of."""
    length = length.astype(jnp.int32)
    mask = jnp.ones((tokens.shape[0], 1, 1), bool)
    token = tokens[:, None].astype(jnp.int32)
    with use_mesh(target.mesh):
        verified = target.verify(params.target, cache, token, length[:, None], mask, length)
    gumbel = noise(request.sampling, length[:, None] + 1, target.vocab_size)
    return perturb(verified.logits, gumbel, request.sampling)[:, 0]
