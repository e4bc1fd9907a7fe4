"""What is compiled beforehand is what is called, and whatever fails there reaches the caller."""

import dataclasses
import threading
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from longspec_jax import PLAIN
from longspec_jax.decoding.jit_cache import compile_side_by_side
from longspec_jax.generation import warm
from longspec_jax.generation.speeds import KnownSpeeds
from longspec_jax.generation.warm import WarmShapes
from tests.infer.toys import toy_spec
from tests.kit import compilations, in_tiers, prefill_alone

OPTIONS = dict(max_new_tokens=40, temperature=1.0, seed=3, eos_token_id=[])
PROMPT = "ab cd gh é"
PREFILL = "jit(_prefill_chunk)", "jit(_extend)", "jit(_start)"


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    jax.clear_caches()
    # The toy is shared with other tests: what it knows of trees and shapes is not.
    own = {"_speeds": KnownSpeeds(), "_warm": WarmShapes()}
    return dataclasses.replace(toy_spec(), tree=None, **own)


def added(number: int):
    """A separate function, so that it was not compiled before."""
    return jax.jit(lambda x: x + number)


def test_the_first_call_finds_what_was_compiled() -> None:
    functions, x = [added(number) for number in range(5)], jnp.ones(3)
    with compilations() as found:
        compile_side_by_side(function.lower(x) for function in functions)
    assert len(found) == 5
    with compilations() as found:
        results = [function(x) for function in functions]
    assert not found
    assert [float(result.sum()) for result in results] == [3, 6, 9, 12, 15]


def test_lowering_stays_in_the_callers_thread() -> None:
    threads = []

    def traced(x: jax.Array) -> jax.Array:
        threads.append(threading.current_thread())
        return x

    x = jnp.ones(3)
    compile_side_by_side(jax.jit(lambda x: traced(x)).lower(x) for _ in range(3))
    assert threads == [threading.current_thread()] * 3


def refused() -> jax.stages.Lowered:
    """A lowered program that no compiler takes."""
    program = mock.Mock(spec=jax.stages.Lowered)
    program.compile.side_effect = ValueError("no such instruction")
    return program


def test_what_fails_reaches_the_caller() -> None:
    x = jnp.ones(3)
    with pytest.raises(ValueError, match="no such instruction"):
        compile_side_by_side([added(1).lower(x), refused(), added(2).lower(x)])

    def programs() -> Iterator[jax.stages.Lowered]:
        yield added(1).lower(x)
        raise TypeError("not traceable")

    with pytest.raises(TypeError, match="not traceable"):
        compile_side_by_side(programs())


@pytest.mark.parametrize("streams", in_tiers([False, True], False), ids=["at once", "streamed"])
def test_a_first_call_compiles_every_program_once(spec, streams) -> None:
    """The rounds of plain decoding and of a tree, and the prefill that both share."""
    on_round = (lambda added: None) if streams else None
    with compilations() as found:
        result = spec.generate(PROMPT, **OPTIONS, on_round=on_round)
    assert found.count("jit(one_round)" if streams else "jit(many_rounds)") == 2
    assert [found.count(name) for name in PREFILL] == [1, 1, 1]
    with compilations() as found:
        again = spec.generate(PROMPT, **OPTIONS, on_round=on_round)
    assert not found and again.stats.compile_seconds == 0.0
    plain = spec.generate(PROMPT, tree=PLAIN, **OPTIONS)
    assert result.sequences == again.sequences == plain.sequences


@pytest.mark.parametrize(
    ("adaptive", "streams"), [(False, True), (True, False)], ids=["streamed", "adaptive"]
)
def test_named_trees_are_compiled_once_too(spec, adaptive, streams) -> None:
    on_round = (lambda added: None) if streams else None
    options = dict(OPTIONS, tree=(2, 2), adaptive=adaptive, on_round=on_round)
    with compilations() as found:
        result = spec.generate(PROMPT, **options)
    rounds = "jit(one_round)" if streams else "jit(many_rounds)"
    assert found.count(rounds) == (3 if adaptive else 1)
    assert [found.count(name) for name in PREFILL] == [1, 1, 1]
    assert result.sequences == spec.generate(PROMPT, tree=PLAIN, **OPTIONS).sequences


def test_prompts_that_are_prefilled_alone_are_compiled_beforehand(spec, monkeypatch) -> None:
    """Two sizes of chunks, for one row, and what puts it among the others."""
    prefill_alone(monkeypatch)
    spec = dataclasses.replace(toy_spec(max_positions=1024), prefill_chunk=512, tree=(2, 2))
    beforehand: list[str] = []

    def noted(programs) -> None:
        compile_side_by_side(programs)
        beforehand.extend(found)

    monkeypatch.setattr(warm, "compile_side_by_side", noted)
    with compilations() as found:
        spec.generate([[3] * 9, [4, 5], [6] * 200], **OPTIONS)
    counts = {"many_rounds": 1, "_prefill_chunk": 2, "_extend": 2, "_start": 1, "insert": 1}
    for name, count in counts.items():
        assert beforehand.count(f"jit({name})") == found.count(f"jit({name})") == count, name


def test_what_a_compiler_says_ends_the_call(spec, monkeypatch) -> None:
    def refuse(programs) -> None:
        compile_side_by_side([*programs, refused()])

    monkeypatch.setattr(warm, "compile_side_by_side", refuse)
    for tree in (None, (2, 2)):
        with pytest.raises(ValueError, match="no such instruction"):
            spec.generate(PROMPT, tree=tree, **OPTIONS)
