"""What streaming costs: rounds driven from Python, beside the same rounds in one executable.

The host launches every round, fetches the small arrays of its state in one transfer and takes the
new tokens out, as :func:`longspec_jax.generation.runner.run_rounds` and its consumers do; turning
tokens into text is not counted. The launch of the next round waits for that transfer, which is the
overhead: the device has nothing to do in between.
"""

from collections.abc import Callable, Iterator

import jax

from longspec_jax.decoding.engine import SpecState
from longspec_jax.decoding.simulated import simulated_step
from longspec_jax.generation.runner import Progress

simulated_round = jax.jit(
    simulated_step,
    static_argnames=("target", "drafter", "lengths", "seed"),
    donate_argnames=("state",),
)
"""One round of :func:`longspec_jax.decoding.simulated.simulated_decode`; the state is donated."""


def stream(
    advance: Callable[[SpecState], SpecState], state: SpecState
) -> Iterator[list[list[int]]]:
    """Yield the tokens that every round adds to every row; returns the last state.

    Args:
      advance: runs one round and donates the state it is given.
      state: the state before the first round.
    """
    progress = Progress.of(state)
    while not progress.done.all():
        state = advance(state)
        seen, progress = progress.emitted, Progress.of(state)
        rows = zip(progress.output, seen, progress.emitted, strict=True)
        yield [row[begin:end].tolist() for row, begin, end in rows]
    return state


def read_all(advance: Callable[[SpecState], SpecState], state: SpecState) -> SpecState:
    """Stream to the end as one that reads every round; returns the last state."""
    rounds = stream(advance, state)
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            return end.value
