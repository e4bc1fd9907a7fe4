"""Programs come and go without changing what they compute, and a process holds a bounded number."""

import gc
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax import PLAIN
from longspec_jax.decoding import jit_cache
from longspec_jax.decoding import prefill as prefill_lib
from longspec_jax.decoding.jit_cache import LRU, PROGRAMS, Program, program
from longspec_jax.decoding.round import many_rounds
from tests.footprint import Footprint
from tests.infer.toys import toy_spec
from tests.kit import compilations


def test_the_least_recently_used_entry_drops_out() -> None:
    recent = LRU(2)
    made = []
    for key in "abacab":
        recent.get(key, partial(made.append, key))
    assert made == ["a", "b", "c", "b"]
    assert recent.keeps({"a", "b"}) and not recent.keeps({"a", "c"})


def test_keys_are_noted_and_the_limit_lowered_for_a_while() -> None:
    recent = LRU(3)
    recent.get("a", str)
    with recent.noted() as used:
        recent.get("b", str)
        recent.get("a", str)
    recent.get("c", str)
    assert used == {"a", "b"}
    with recent.limited(1):
        assert recent.keeps({"c"}) and not recent.keeps({"a"})
    for key in "ab":
        recent.get(key, str)
    assert recent.keeps({"a", "b", "c"})


def scaled(factor: int, x: jax.Array, y: dict[str, jax.Array]) -> jax.Array:
    """``factor * x + y``."""
    return factor * x + y["y"]


def inputs(size: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return np.arange(size, dtype=np.float32), {"y": np.ones(size, np.float32)}


def made() -> Program:
    return program(static_argnames=("factor",), donate_argnames=("x",))(scaled)


def test_a_program_is_its_jitted_function() -> None:
    ours = made()
    assert ours.__name__ == "scaled" and ours.__doc__ == scaled.__doc__
    x = jnp.ones(3)
    np.testing.assert_array_equal(ours(2, x, {"y": jnp.zeros(3)}), [2, 2, 2])
    assert x.is_deleted(), "donated"
    assert "jit_scaled" in ours.lower(2, *inputs(3)).as_text()
    assert ours.trace(2, *inputs(3)).fun_name == "scaled"


def test_statics_structures_and_shapes_are_programs_of_their_own() -> None:
    ours = made()
    for factor, size in ((2, 3), (2, 5), (3, 3), (2, 3)):
        x, y = inputs(size)
        np.testing.assert_array_equal(ours(factor, x, y), factor * x + 1)
    assert ours._cache_size() == 3
    ours(2, inputs(3)[0], {**inputs(3)[1], "z": np.ones(2)})
    assert ours._cache_size() == 4


def test_products_of_small_programs_are_not_timed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA knows the option on a CPU, too; parameters count by their bytes, existing or not.

    What else a program takes does not count: a cache's size must not choose the products' kernels.
    """
    assert jit_cache.compiler_options(small=True) == jit_cache.compiler_options(small=False) == {}
    monkeypatch.setattr(jit_cache.jax, "default_backend", lambda: "gpu")
    asked = []
    options = jit_cache.compiler_options
    monkeypatch.setattr(
        jit_cache, "compiler_options", lambda small: asked.append(small) or options(small)
    )
    np.testing.assert_array_equal(made()(2, *inputs(3)), [1, 3, 5])

    def weighed(params: jax.Array, cache: jax.Array) -> jax.Array:
        return params[0] * cache

    size = jit_cache.SMALL // 4
    for numbers, others in ((size, size), (size + 1, 1)):
        x, y = (jax.ShapeDtypeStruct((count,), jnp.float32) for count in (numbers, others))
        program()(weighed).of_shape(x, y)
    assert asked == [True, True, False]
    assert options(small=True) == {"xla_gpu_autotune_level": 0} and options(small=False) == {}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mappings are read from /proc")
def test_mappings_stay_bounded_and_results_right() -> None:
    ours = made()
    with PROGRAMS.limited(4):
        for size in range(1, 5):
            ours(2, *inputs(size))
        before = Footprint.now().mappings
        for size in (*range(5, 45), *range(1, 5)):
            x, y = inputs(size)
            np.testing.assert_array_equal(ours(2, x, y), 2 * x + 1)
        assert Footprint.now().mappings < before + 50
        assert ours._cache_size() == 4


def test_calls_whose_programs_were_let_go_are_warmed_again_and_say_the_same() -> None:
    """A limit of one call's four programs: every second call compiles, outside what is timed."""
    # The toy of the usual window has plans of other tests.
    spec, counted = toy_spec(38), (prefill_lib._prefill_chunk, prefill_lib._start, many_rounds)
    options = dict(max_new_tokens=9, tree=PLAIN, eos_token_id=[])
    with PROGRAMS.limited(4):
        first, again, other, back = (
            spec.generate([[1, 2, 3]] * rows, **options) for rows in (1, 1, 2, 1)
        )
        assert [program._cache_size() for program in counted] == [1, 1, 1]
        gc.collect()
        runners = [plan.runners[False] for plan in spec.plans.values()]
        assert [len(runner._programs) for runner in runners] == [1, 0], "those that are kept"
    assert first.sequences == again.sequences == back.sequences == other.sequences[:1]
    compiled = [result.stats.compile_seconds for result in (first, again, other, back)]
    assert compiled[1] == 0 and min(compiled[0], compiled[2], compiled[3]) > 0.1
    assert back.stats.prefill_seconds < compiled[3]


def test_a_second_call_of_a_kind_finds_its_rounds_without_looking_at_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, asked, of_shape = toy_spec(), [], many_rounds.of_shape
    monkeypatch.setattr(many_rounds, "of_shape", lambda *args: asked.append(1) or of_shape(*args))
    counts = []
    for prompt in ([1, 2, 3], [4, 5], [6]):
        spec.generate(prompt, max_new_tokens=9, tree=PLAIN, eos_token_id=[])
        counts.append(len(asked))
    assert counts[0] == counts[1] == counts[2]


def test_programs_cleared_by_their_user_are_compiled_outside_what_is_timed() -> None:
    spec = toy_spec()
    options = dict(max_new_tokens=9, tree=PLAIN, eos_token_id=[])
    spec.generate([1, 2, 3], **options)
    jax.clear_caches()
    for prompt, cold in (([1], True), ([1, 2, 3], False)):
        with compilations() as found:
            stats = spec.generate(prompt, **options).stats
        assert bool(found) == (stats.compile_seconds > 0) == cold
