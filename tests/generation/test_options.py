"""Generation options: one value a row, transformers' meaning, and refusals that name the rule."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import GenerationConfig

from longspec_jax.checks import Refused
from longspec_jax.config.sampling import NUMBERS, OPTIONS
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.generation.options import TRANSFORMERS_TOP_K, resolve
from tests.kit import each_row
from tests.refusals import NOTHING, edges, wrong

LENGTHS = [5, 7]
SAMPLING_FIELDS = "temperature", "top_k", "top_p", "seed"


def unpacked(request: Any) -> Any:
    """The options of all rows; stop tokens without the padding."""
    stops = tuple(tuple(token for token in row if token >= 0) for row in request.stop_tokens)
    return SimpleNamespace(
        **{field: getattr(request.sampling, field) for field in SAMPLING_FIELDS},
        max_new_tokens=request.max_new_tokens,
        stop_tokens=stops,
        request=request,
    )


def rows(config: Any = None, **options: Any) -> Any:
    return unpacked(resolve(options, config, LENGTHS, model_stop_tokens=(2,), vocab_size=17))


def row(**options: Any) -> Any:
    return unpacked(resolve(options, None, LENGTHS[:1], (2,), vocab_size=2**31))


def test_defaults_are_greedy() -> None:
    found = rows()
    assert found.temperature.tolist() == [0, 0] and found.max_new_tokens.tolist() == [256, 256]
    assert found.stop_tokens == ((2,), (2,)) and found.top_p.tolist() == [1, 1]
    request = found.request
    assert request.sampling.kind is SamplingKind.GREEDY
    assert request.stop_tokens.tolist() == [[2, -1, -1, -1]] * 2


def test_values_by_row() -> None:
    found = rows(temperature=[0, 0.5], seed=[1, 2**32 - 1], top_k=[0, 3], eos_token_id=[[1, 2], []])
    assert found.temperature.tolist() == [0, 0.5] and found.seed.tolist() == [1, 2**32 - 1]
    assert found.stop_tokens == ((1, 2), ())
    request = found.request
    assert request.sampling.kind is SamplingKind.ANY
    assert str(request.sampling.seed.dtype) == "uint32"


def test_filters_of_greedy_rows_are_not_computed() -> None:
    sampling = rows(top_k=[5, 0], min_p=[0.5, 0], temperature=[0, 1.0]).request.sampling
    assert sampling.kind is SamplingKind.SAMPLED


def test_biases_penalties_and_logprobs_of_rows() -> None:
    """Every kind of row is served; those that ask for nothing have no tables."""
    config = GenerationConfig(repetition_penalty=1.25, min_p=0.5, do_sample=True)
    request = rows(config, logit_bias=[{}, {3: -100, 5: 2.5}], logprobs=[None, 4]).request
    adjustments = request.adjustments
    assert request.sampling.kind is SamplingKind.ANY
    assert adjustments.repetition_penalty.tolist() == [1.25, 1.25]
    assert adjustments.bias_tokens.tolist() == [[-1, -1], [3, 5]]
    assert adjustments.bias.tolist() == [[0, 0], [-100, 2.5]]
    np.testing.assert_allclose(request.sampling.log_min_p, np.log(0.5))
    assert request.logprobs.tolist() == [-1, 4] and request.prompt_logprobs is None
    plain = rows(repetition_penalty=1.0, presence_penalty=0, logit_bias={}, prompt_logprobs=True)
    assert plain.request.adjustments is None
    assert plain.request.sampling.kind is SamplingKind.GREEDY
    assert plain.request.prompt_logprobs.tolist() == [0, 0]
    assert rows(prompt_logprobs=False, logprobs=None).request.prompt_logprobs is None
    assert rows(presence_penalty=[0, 0.5]).request.adjustments is not None


@each_row(("value", "sets"), [(3, (3,)), ([3, 4], (3, 4)), ([], ()), ({3}, (3,))])
def test_stop_sets_for_all_rows(value, sets) -> None:
    assert rows(eos_token_id=value).stop_tokens == (sets, sets)


@each_row(
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
    short = GenerationConfig(max_length=2)
    assert rows(short, max_new_tokens=3).max_new_tokens.tolist() == [3, 3], "what is given wins"
    rows(GenerationConfig(repetition_penalty=1.0, num_beams=1))


REFUSED: dict[type[Exception], dict[str, dict[str, Any]]] = {
    ValueError: {
        "drop one of the two": dict(do_sample=False, temperature=0.5),
        "needs a temperature above 0": dict(do_sample=True, temperature=0),
        "1 stop sets for 2 prompts": dict(eos_token_id=[[1]]),
        r"pass eos_token_id=\[\]": dict(eos_token_id=-1),
        "^logit_bias=3 must be a mapping of token ids": dict(logit_bias=3),
        "^logit_bias has 1 mappings for 2 prompts": dict(logit_bias=[{3: 1.0}]),
        "^logit_bias has the token 17 of row 0, .* 0 to 16": dict(logit_bias={17: 1}),
        "^logit_bias has the token '3' of row 0": dict(logit_bias={"3": 1}),
        r"^logit_bias\[3\]=101 of row 0 must be a num": dict(logit_bias={3: 101}),
        "^logprobs=21 must be a whole number from 0 to 20": dict(logprobs=21),
        "^logprobs=True must be a whole number": dict(logprobs=True),
        "^prompt_logprobs has 1 values for 2 prompts": dict(prompt_logprobs=[True]),
        "^max_length=6 must exceed the 7 tokens .* of row 1": dict(max_length=6),
        "max_length=6 must .* 7 .* of row 1": dict(config=GenerationConfig(max_length=6)),
        "or pass max_new_tokens$": dict(config=GenerationConfig(max_length=7)),
    },
    TypeError: {
        "'temprature'; did you mean 'temperature'": dict(temprature=1),
        "'max_tokens'; did you mean 'max_new_tokens'": dict(max_tokens=9),
        "'frobnicate'; known are max_new_tokens, do_sample": dict(frobnicate=None),
    },
    NotImplementedError: {
        "^stop= is not .* as stop_strings=, .*eos_token_id=": dict(stop="a"),
        "pass the ids of stop tokens as eos_token": dict(stop_token_ids=[3]),
        "what the tokenizer returned": dict(attention_mask=[1]),
        "^num_beams=2: not supported by": dict(num_beams=2),
        "^output_scores=True: .*generate.. itself": dict(output_scores=True),
        "^typical_p=0.5: not supported by": dict(typical_p=0.5),
        "not supported": dict(no_repeat_ngram_size=np.asarray([0, 0])),
        "^generation_config.typical_p=0.5: not supported by speculative decoding": dict(
            config=GenerationConfig(typical_p=0.5)
        ),
    },
}
"""Options, by the refusal and its words."""


@each_row("error", REFUSED)
def test_refusals(error: type[Exception]) -> None:
    for message, options in REFUSED[error].items():
        with pytest.raises(error, match=message):
            rows(**options)


def test_keywords_of_transformers_without_effect_here() -> None:
    """The same as in a GenerationConfig."""
    neutral = dict(use_cache=True, num_beams=1, pad_token_id=0, repetition_penalty=1.0)
    neutral |= dict(early_stopping=True, return_dict_in_generate=False, output_scores=False)
    found = rows(**neutral, do_sample=True, stop=None, num_return_sequences=1)
    assert found.temperature.tolist() == [1, 1] and found.max_new_tokens.tolist() == [256, 256]
    assert rows(GenerationConfig(**neutral)).temperature.tolist() == [0, 0]
    assert rows(max_length=20).max_new_tokens.tolist() == [15, 13]
    assert rows(max_length=2, max_new_tokens=4).max_new_tokens.tolist() == [4, 4]
    assert rows(GenerationConfig(max_new_tokens=3), max_length=20).max_new_tokens.tolist() == [
        15,
        13,
    ]


@each_row("array", [np.asarray, jnp.asarray, tuple])
def test_arrays_are_values_by_row(array) -> None:
    assert rows(seed=array([3, 4])).seed.tolist() == [3, 4]
    assert rows(eos_token_id=array([3, 4])).stop_tokens == ((3, 4), (3, 4))
    assert row(eos_token_id=np.int64(3), top_k=np.int32(0)).stop_tokens == ((3,),)


@each_row("name", NUMBERS)
def test_a_value_that_breaks_its_rule(name) -> None:
    """The refusal has the option, the value as it was given, and the row if values differ by row.

    A list is a value for each row.
    """
    rule = OPTIONS[name].rule
    [good, *_] = edges(rule)
    for value in (one for one in wrong(rule) if not isinstance(one, list | type(None))):
        with pytest.raises(Refused) as error:
            row(**{name: value})
        assert (error.value.name, error.value.value, error.value.row) == (name, value, None) or (
            value != value
        )
        with pytest.raises(Refused, match=f"^{name}=.* of row 1 must be "):
            rows(**{name: [good, value]})
    for value in edges(rule):
        row(**{"temperature": 1.0, name: value})


@each_row("name", NUMBERS)
def test_a_sequence_has_a_value_per_row(name) -> None:
    for values in ([], [1, 1]):
        expected = f"{name} has {len(values)} values for 1 prompt; pass one value, or one per"
        with pytest.raises(ValueError, match=expected):
            row(**{name: values})


@each_row(
    "value",
    ["</s>", "", 1.9, [1.9], [1, "2"], [None], True, [True], {}, b"ab", [[1], 2], [[1], None], 3j]
    + [[["a"]], NOTHING, np.float32(1), -1, [[-1]]],
)
def test_stop_tokens_that_are_none(value) -> None:
    with pytest.raises(ValueError, match="^eos_token_id="):
        row(eos_token_id=value)


@each_row("value", [17, 999_999, 2**40, [3, 17], [[3], [17]]])
def test_stop_tokens_lie_in_the_vocabulary(value) -> None:
    with pytest.raises(
        ValueError, match="eos_token_id=.* is outside the target's vocabulary of 17"
    ):
        rows(eos_token_id=value)
    with pytest.raises(ValueError, match="outside the target's vocabulary of 17"):
        rows(GenerationConfig(eos_token_id=[3, 2**40]))
    with pytest.raises(ValueError, match="eos_token_id=1099511627776 is outside"):
        row(eos_token_id=2**40)


@each_row("value", ["no", "", 1, 0, 1.0, [True], {}])
def test_whether_to_sample_is_a_yes_or_no(value) -> None:
    with pytest.raises(ValueError, match=r"^do_sample=.* must be True or False"):
        row(do_sample=value)


@each_row("config", [{}, {"temperature": 0.5}, "x", 3, GenerationConfig, ["a"]])
def test_what_is_no_generation_config(config) -> None:
    with pytest.raises(ValueError, match="generation_config must be a transformers Generation"):
        rows(config)


@each_row("options", [dict(top_k=5), dict(top_p=0.5), dict(top_k=[5, 0]), dict(min_p=0.1)])
@each_row("greedy", [{}, dict(temperature=0), dict(do_sample=False)])
def test_a_filter_without_a_temperature(options, greedy) -> None:
    """Nothing is ignored in silence; what does nothing anyway, or comes with a config, may stay."""
    [(name, value)] = options.items()
    with pytest.raises(ValueError) as error:
        rows(**options, **greedy)
    assert str(error.value).startswith(f"{name}={value} has no effect at temperature 0; set temp")
    rows(top_k=0, top_p=1.0, **greedy)
    rows(GenerationConfig(**{name: np.max(value).item()}), **greedy)
    rows(**options, temperature=[0, 1])


def test_extreme_values_that_are_fine() -> None:
    found = row(temperature=1.3e-38, top_p=1e-60, top_k=2**31 - 1, max_new_tokens=2**31 - 1)
    assert found.temperature > 0 and found.top_p > 0
    assert (found.top_k, found.max_new_tokens) == (2**31 - 1, 2**31 - 1)


def test_a_config_keeps_the_default_of_transformers() -> None:
    """Which filters what it samples by ``top_k=50`` unless told otherwise, in any version."""
    defaults = getattr(GenerationConfig, "_get_default_generation_params", lambda: {"top_k": 50})()
    assert defaults["top_k"] == TRANSFORMERS_TOP_K
    older = GenerationConfig()
    older.top_k, older.do_sample = 50, False  # As transformers 4 makes them.
    for config in (GenerationConfig(do_sample=True), GenerationConfig(do_sample=False), older):
        assert rows(config, do_sample=True).top_k.tolist() == [TRANSFORMERS_TOP_K] * 2
        assert rows(config, do_sample=True, top_k=0).top_k.tolist() == [0, 0]
    assert rows(GenerationConfig(do_sample=True, top_k=7)).top_k.tolist() == [7, 7]
    assert rows(do_sample=True).top_k.tolist() == [0, 0]
