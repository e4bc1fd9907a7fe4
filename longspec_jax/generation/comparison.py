"""Is the output that of plain decoding, and if not, how close was the call?

The answer must be yes where the target promises it (:mod:`longspec_jax.decoding.batch_invariant`).
Elsewhere differently shaped reductions may flip a near-tie; the gap between the two candidates at
the first divergence says whether that is all.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding.adjustments import Adjustments
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.jit_cache import program
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Params
from longspec_jax.generation.activity import DecodingPlainly
from longspec_jax.generation.call import CallPlan
from longspec_jax.generation.memory import free_bytes
from longspec_jax.generation.result import GenerateResult, OnRound, StreamRound
from longspec_jax.generation.run import Run, follow, start
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


def run_both(run: Run, on_round: OnRound | None = None) -> Comparison:
    """Run a call with speculation and without, and find every row's first divergence.

    Where memory takes two caches, both runs begin with copies of one prefill. Both run in the same
    way, round by round if someone listens, so that their seconds compare. A call that decodes
    plainly is its own comparison.
    """
    if not run.plan.drafter.tree.num_levels:
        plain = follow(run, on_round)
        return Comparison(plain, plain, ())
    plan, plain_run = run.plan.without_draft, None
    if not plan.waits and _room_for_two(plan):
        plain_run = run.plainly()
    speculative = follow(run, on_round)
    run.engine.close()  # Its cache makes room for plain decoding's.
    if plain_run is None:
        plain_run = start(
            plan, run.batch, run.known, streams=run.streams, on_activity=run.on_activity
        )
    total = int(run.batch.request.max_new_tokens.sum())

    def listen(added: StreamRound) -> None:
        run.on_activity(DecodingPlainly(sum(added.stats.new_tokens), total))

    run.on_activity(DecodingPlainly(0, total))
    plain = follow(plain_run, listen if on_round is not None else None)
    pairs = enumerate(zip(plain.sequences, speculative.sequences, strict=True))
    found = (_divergence(plain_run, row, pair) for row, pair in pairs)
    divergences = tuple(item for item in found if item is not None)
    return Comparison(speculative, plain, divergences)


def _room_for_two(plan: CallPlan) -> bool:
    """Whether the device holds a second cache next to the first; the host is not asked to."""
    if plan.target.offload:
        return False
    free = free_bytes()
    return free is None or free > plan.memory.cache_bytes + plan.memory.working_bytes


def score_gap(
    run: Run, emitted: Sequence[Sequence[int]], row: int, pair: tuple[int, int]
) -> float | None:
    """How much plain decoding's scores of a row prefer the first token of a pair to the second.

    Args:
      run: of the plain call, whose cache holds all tokens before the last ones.
      emitted: the tokens of each row after its prompt, the last one included.

    Returns:
      The difference, noise and temperature included; None if filters left out one of the two.
    """
    plan, request = run.plan, run.batch.request
    whole = [[*prompt, *own] for prompt, own in zip(run.batch.prompts, emitted, strict=True)]
    lengths, counts = list(map(len, whole)), list(map(len, emitted))
    at = jnp.asarray([tokens[-1] for tokens in whole]), jnp.asarray(lengths) - 1
    adjustments = None
    if request.adjustments is not None:
        tokens = np.zeros((len(whole), max(lengths)), np.int32)
        for padded, own in zip(tokens, whole, strict=True):
            padded[: len(own)] = own
        sizes = np.asarray(lengths), plan.target.vocab_size, np.asarray(counts)
        given = request.adjustments, tokens, *sizes
        adjustments = Adjustments.of_prompts(*given)
    state = request.sampling, adjustments, run.engine.rows.cache
    scores = _scores(plan.target, plan.params, *state, *at)[row]
    gap = float(scores[pair[0]] - scores[pair[1]])
    return gap if math.isfinite(gap) else None


def first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Index of the first entry that differs; None if the sequences are equal."""
    pairs = enumerate(itertools.zip_longest(left, right))
    return next((index for index, (one, other) in pairs if one != other), None)


def _divergence(
    run: Run, row: int, pair: tuple[tuple[int, ...], tuple[int, ...]]
) -> Divergence | None:
    """The first token of a row where the plain and the speculative sequence part."""
    index = first_difference(*pair)
    if index is None:
        return None
    plain, other = (tokens[index] if index < len(tokens) else None for tokens in pair)
    gap = None
    # The first token is drawn from the prefill, which both share and which keeps no logits. Where
    # rows waited for slots, the cache of this one is another's by now; and rings and states are
    # those of the text's end.
    kept = index > 0 and not run.plan.waits and not run.plan.target.has_bounded_layers
    if kept and plain is not None and other is not None:
        emitted = [row.tokens[:index] for row in run.rows]
        gap = score_gap(run, emitted, row, (plain, other))
    return Divergence(row, index, plain, other, gap)


@program(static_argnames=("target",))
def _scores(
    target: TargetModel,
    params: Params,
    sampling: Sampling,
    adjustments: Adjustments | None,
    cache: KVCache,
    tokens: Array,
    length: Array,
) -> Array:
    """What the draw after ``tokens[b]`` at position ``length[b]`` takes the argmax of."""
    length = length.astype(jnp.int32)
    mask = jnp.ones((tokens.shape[0], 1, 1), bool)
    token = tokens[:, None].astype(jnp.int32)
    with use_mesh(target.mesh):
        verified = target.verify(params.target, cache, token, length[:, None], mask, length, 0)
    below = RoundNoise.of_round(sampling, length, 0, target.vocab_size, adjustments)
    return below.scores(verified.logits, 0)[:, 0]
