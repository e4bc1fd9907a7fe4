"""Never much slower than plain decoding: real models, a draft that knows nothing, real seconds."""

import dataclasses

import jax
import numpy as np
import pytest

from longspec_jax import PLAIN, GenerateResult, LongSpec, demo_prompts
from longspec_jax.loading import DEMO


@pytest.mark.slow
@pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")
def test_a_useless_draft_costs_at_most_a_tenth() -> None:
    spec, random = LongSpec.demo(), np.random.default_rng(0)

    def useless(leaf: jax.Array) -> jax.Array:
        values = np.asarray(0.05 * random.normal(size=leaf.shape), leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    spec = dataclasses.replace(spec, draft_params=jax.tree.map(useless, spec.draft_params))
    prompt = next(iter(demo_prompts().values()))[:1000]
    options = dict(max_new_tokens=384, eos_token_id=[])
    plain, chosen = [], []
    for _ in range(4):  # In turn, and the best of each: other work on the machine only adds.
        plain.append(spec.generate(prompt, tree=PLAIN, **options))
        chosen.append(spec.generate(prompt, adaptive=True, **options))
    assert {result.sequences for result in (*plain, *chosen)} == {plain[0].sequences}
    assert chosen[0].stats.acceptance_length < 1.1
    # Against the plain rounds of the same run, which met the same load.
    assert min(map(_over_own_plain_rounds, chosen)) <= 1.10
    seconds = [min(r.stats.decode_seconds for r in results) for results in (plain, chosen)]
    assert seconds[1] <= 1.25 * seconds[0], "1.10 on a quiet machine"


def _over_own_plain_rounds(result: GenerateResult) -> float:
    """Seconds of a run over what its tokens would have taken at the pace of its plain rounds."""
    stats, plain = result.stats, result.stats.trees[0]
    return stats.decode_seconds / (stats.decode_tokens * plain.seconds / plain.rounds)
