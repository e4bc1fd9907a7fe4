"""Generation options: one value a row, transformers' meaning, and refusals that name the rule."""

import numpy as np
import pytest
from transformers import GenerationConfig

from longspec_jax.generation.options import resolve

LENGTHS = [5, 7]


def rows(config=None, **options):
    return resolve(options, config, LENGTHS, model_stop_tokens=(2,))


def test_defaults_are_greedy() -> None:
    found = rows()
    assert found.temperature.tolist() == [0, 0] and found.max_new_tokens.tolist() == [256, 256]
    assert found.stop_tokens == ((2,), (2,)) and found.top_p.tolist() == [1, 1]
    request = found.request()
    assert not request.sampling.stochastic and not request.sampling.filtered
    assert request.stop_tokens.tolist() == [[2, -1, -1, -1]] * 2


def test_values_by_row() -> None:
    found = rows(temperature=[0, 0.5], seed=[1, 2**32 - 1], top_k=[0, 3], eos_token_id=[[1, 2], []])
    assert found.temperature.tolist() == [0, 0.5] and found.seed.tolist() == [1, 2**32 - 1]
    assert found.stop_tokens == ((1, 2), ())
    request = found.request()
    assert request.sampling.stochastic and request.sampling.filtered
    assert str(request.sampling.seed.dtype) == "uint32"


def test_filters_of_greedy_rows_are_not_computed() -> None:
    assert not rows(top_k=[5, 0], temperature=[0, 1.0]).request().sampling.filtered


@pytest.mark.parametrize(("value", "sets"), [(3, (3,)), ([3, 4], (3, 4)), ([], ()), ({3}, (3,))])
def test_stop_sets_for_all_rows(value, sets) -> None:
    assert rows(eos_token_id=value).stop_tokens == (sets, sets)


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        (dict(do_sample=True), 1.0),
        (dict(do_sample=False), 0.0),
        (dict(do_sample=True, temperature=0.5), 0.5),
        (dict(temperature=0.5), 0.5),
        (dict(config=GenerationConfig(do_sample=True, temperature=0.25)), 0.25),
        (dict(config=GenerationConfig(temperature=0.25)), 0.0),
        (dict(config=GenerationConfig(), temperature=0.5), 0.5),
        (dict(config=GenerationConfig(do_sample=True, temperature=0.25), do_sample=False), 0.0),
    ],
)
def test_do_sample_has_the_last_word(options, temperature) -> None:
    assert rows(**options).temperature.tolist() == [temperature] * 2


def test_generation_config_values() -> None:
    config = GenerationConfig(max_length=20, eos_token_id=[3, 4], top_p=0.5, use_cache=True)
    found = rows(config)
    assert found.max_new_tokens.tolist() == [15, 13]
    assert found.stop_tokens == ((3, 4),) * 2 and found.top_p.tolist() == [0.5] * 2
    assert rows(config, max_new_tokens=3).max_new_tokens.tolist() == [3, 3]
    rows(GenerationConfig(repetition_penalty=1.0, num_beams=1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(temperature=[0.5]), ValueError, "temperature has 1 values for 2 prompts"),
        (dict(temperature=float("nan")), ValueError, "temperature=nan of row 0"),
        (dict(temperature="warm"), ValueError, "must be a number"),
        (dict(do_sample=False, temperature=0.5), ValueError, "drop one of the two"),
        (dict(do_sample=True, temperature=0), ValueError, "needs a temperature above 0"),
        (dict(top_p=1.5), ValueError, r"top_p=1.5 of row 0 must be in \(0, 1\]"),
        (dict(top_k=-1), ValueError, "top_k=-1 of row 0 must be >= 0"),
        (dict(top_k=1.5), ValueError, "top_k=1.5 must be an integer"),
        (dict(max_new_tokens=[4, 0]), ValueError, "max_new_tokens=0 of row 1 must be >= 1"),
        (dict(seed=-1), ValueError, "seed=-1 of row 0 must be in"),
        (dict(seed=2**32), ValueError, "must be in"),
        (dict(eos_token_id=[[1]]), ValueError, "1 stop sets for 2 prompts"),
        (dict(eos_token_id=-1), ValueError, r"pass eos_token_id=\[\]"),
        (dict(num_beams=2), TypeError, "unknown generation option 'num_beams'"),
        (dict(config=GenerationConfig(repetition_penalty=1.2)), NotImplementedError, "repetition"),
        (dict(config=GenerationConfig(max_length=6)), ValueError, "max_new_tokens=-1 of row 1"),
    ],
)
def test_refusals(options, error, message) -> None:
    with pytest.raises(error, match=message):
        rows(**options)


def test_arrays_are_values_by_row() -> None:
    assert rows(seed=np.array([3, 4])).seed.tolist() == [3, 4]
