"""The scores and logits of emitted tokens, as transformers' ``generate`` returns them.

Decoding keeps no logits: of a round, most are of nodes that are not accepted. So these come from a
pass of their own over prompt and text, when the text is there. It costs a prefill, and in 16 bits
its logits may differ from those of the draws by a rounding.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array
from longspec_jax.checks import shown_bytes
from longspec_jax.decoding.adjustments import Adjustments, adjust
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.jit_cache import program
from longspec_jax.decoding.logprobs import SLICE
from longspec_jax.decoding.rows import Request, RowShardings
from longspec_jax.decoding.runner import chunk_of
from longspec_jax.decoding.sampling import Sampling, processed
from longspec_jax.decoding.target import TargetModel
from longspec_jax.generation.call import CallPlan
from longspec_jax.generation.inputs import Batch
from longspec_jax.generation.memory import free_host_bytes
from longspec_jax.ops.partitioned import use_mesh


def check_host(wanted: int, request: Request, vocab_size: int) -> None:
    """Refuse arrays that the host's memory does not hold.

    Args:
      wanted: how many numbers are kept of each token of the vocabulary: scores, logits, or both.
      request: options of all rows.

    Raises:
      MemoryError: says the bytes, and what to change.
    """
    tokens, free = int(np.asarray(request.max_new_tokens, np.int64).sum()), free_host_bytes()
    needed = 4 * wanted * tokens * vocab_size
    if free is not None and needed > free:
        raise MemoryError(
            f"output_scores, output_logits: {tokens} new tokens times {vocab_size} of the "
            f"vocabulary take {shown_bytes(needed)} of the host's memory, and {shown_bytes(free)} "
            "are free; lower max_new_tokens, or pass logprobs=20 for the most likely tokens"
        )


def scores_of(
    plan: CallPlan, batch: Batch, sequences: Sequence[tuple[int, ...]], wanted: Sequence[str]
) -> dict[str, tuple[np.ndarray, ...]]:
    """The scores and logits ``[n, V]`` of every row's ``n`` emitted tokens, float32.

    Args:
      plan: of the call that emitted them; its rows need not be there any more.
      wanted: ``scores``, ``logits``, or both.
    """
    found = [_scores_of_row(plan, batch, *row, wanted) for row in enumerate(sequences)]
    return {name: tuple(row[name] for row in found) for name in wanted}


def _scores_of_row(
    plan: CallPlan, batch: Batch, row: int, emitted: tuple[int, ...], wanted: Sequence[str]
) -> dict[str, np.ndarray]:
    target, params, prompt = plan.target, plan.params.target, batch.prompts[row]
    shape = len(emitted), target.vocab_size
    found = {name: np.empty(shape, np.float32) for name in wanted}
    whole = np.asarray([*prompt, *emitted], np.int32)
    length, first = len(whole) - 1, len(prompt) - 1  # Nothing follows the last token.
    chunk = chunk_of(length, plan.shape.chunks)
    size, padded = min(chunk, SLICE), np.zeros(-(-length // chunk) * chunk + 1, np.int32)
    padded[: len(whole)] = whole
    capacity = max(plan.shape.capacity, len(padded) - 1)
    request, adjustments = batch.request.row(row), None
    if request.adjustments is not None:
        of_prompt = prompt[None], np.asarray([len(prompt)]), target.vocab_size
        adjustments = Adjustments.of_prompts(request.adjustments, *of_prompt)
    shardings = RowShardings.for_params(params, 1)
    cache = _empty(target, capacity, shardings)
    for offset in range(0, length, chunk):
        tokens, at = padded[None, offset : offset + chunk], np.asarray([offset], np.int32)
        hidden, cache = _run_chunk(target, shardings, params, cache, tokens, at, length - 1 - at)
        end = min(length - offset, chunk)
        for begin in range(max(first - offset, 0), end, size):
            count = min(size, end - begin)
            following = np.zeros((1, size), np.int32)
            following[0, :count] = whole[offset + begin + 1 :][:count]
            given = np.int32(begin), following, np.int32(count), request.sampling, adjustments
            scored, adjustments = _score(target, size, params, hidden, *given)
            at_token = offset + begin - first
            for name, rows in found.items():
                rows[at_token : at_token + count] = np.asarray(scored[name])[:count]
    return found


@program(static_argnames=("target", "capacity", "shardings"))
def _empty(target: TargetModel, capacity: int, shardings: RowShardings) -> KVCache:
    """The cache of a row without a token."""
    cache = target.allocate(1, capacity)
    return jax.lax.with_sharding_constraint(cache, cache.shardings(shardings.cache))


@program(static_argnames=("target", "shardings"), donate_argnames=("cache",))
def _run_chunk(
    target: TargetModel,
    shardings: RowShardings,
    params: PyTree,
    cache: KVCache,
    tokens: Int[Array, "1 C"],
    offset: Int[Array, " 1"],
    last: Int[Array, " 1"],
) -> tuple[Float[Array, "1 C D"], KVCache]:
    """The hidden states of a chunk of a row, and the cache after it."""
    with use_mesh(target.mesh):
        run = target.prefill_chunk(params, cache, tokens, offset, last)
    assert run.hidden is not None, "this target tells no hidden states"
    cache = run.cache
    return run.hidden, jax.lax.with_sharding_constraint(cache, cache.shardings(shardings.cache))


@program(static_argnames=("target", "size"))
def _score(
    target: TargetModel,
    size: int,
    params: PyTree,
    hidden: Float[Array, "1 C D"],
    begin: Int[Array, ""],
    following: Int[Array, "1 n"],
    count: Int[Array, ""],
    sampling: Sampling,
    adjustments: Adjustments | None,
) -> tuple[dict[str, Float[Array, "n V"]], Adjustments | None]:
    """Scores and logits after ``size`` tokens of a chunk, of which ``count`` are wanted.

    Args:
      following: the tokens that were emitted after each.
      adjustments: before the first of these; returned as they are after the last.
    """
    index = jnp.arange(size)
    with use_mesh(target.mesh):
        own = jnp.take(hidden, jnp.minimum(begin + index, hidden.shape[1] - 1), axis=1)
        logits = target.unembed(params, own)
    adjusted = logits
    if adjustments is not None:

        def step(before: Adjustments, one: tuple[Array, Array, Array]) -> tuple[Adjustments, Array]:
            behind, token, wanted = one
            emitted = before.after(token[None, None], wanted[None].astype(jnp.int32))
            return emitted, adjust(behind[None, None], before)[0, 0]

        given = logits[0], following[0], index < count
        adjustments, each = jax.lax.scan(step, adjustments, given)
        adjusted = each[None]
    return {"scores": processed(adjusted, sampling)[0], "logits": logits[0]}, adjustments
