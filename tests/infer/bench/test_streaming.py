"""Streaming in the decode benchmark: the same rounds as the loop's, read one by one.

What the command says of it is tested with what it says of adaptive decoding.
"""

from functools import partial

import numpy as np

from infer.bench import streaming as bench_streaming
from infer.bench.models import (
    draft_state,
    filled_cache,
    greedy_request,
    random_model,
    state_at,
)
from infer.bench.shapes import SHAPES
from infer.bench.simulated import AcceptanceLengths, simulated_decode
from longspec_jax.config import TreeConfig


def test_a_stream_yields_what_the_loop_emits() -> None:
    model, new = random_model(SHAPES["tiny"]), 17
    drafter, lengths = model.drafter(TreeConfig((2, 3))), AcceptanceLengths.geometric(2.0, 2)
    request = greedy_request(2, new)

    def start():
        cache = filled_cache(model.config, 2, 256)
        return state_at(cache, draft_state(model, drafter, 2), drafter.tree, (64, 64), request)

    chosen = (model.target, drafter, 0, lengths.edges, model.params)
    looped = simulated_decode(*chosen, start())
    for way in (bench_streaming.stream, bench_streaming.stream_by_steps):
        rounds = list(way(partial(bench_streaming.simulated_round, *chosen), start()))
        assert len(rounds) == int(looped.record.rounds.max()) > 1
        for row in range(2):
            streamed = [token for added in rounds for token in added[row]]
            # The first token was drawn by a prefill, before any round.
            np.testing.assert_array_equal(streamed, looped.record.output[row, 1:new])
