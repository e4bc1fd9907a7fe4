"""Generation options under their Hugging Face names, checked, with one value per row.

An option is one value for all rows, or a sequence with one value per row. Options of transformers
without an effect here are accepted. Those that speculative decoding does not support, such as
beams and constraints, are refused by name.
"""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from longspec_jax.checks import (
    GenerationConfig,
    as_plain,
    by_row,
    in_row,
    is_whole,
    shown,
    whole_number,
)
from longspec_jax.config.sampling import (
    BIAS,
    OPTIONS,
    PENALTIES,
    CallOptions,
    GenerateOptions,
)
from longspec_jax.decoding.adjustments import AdjustmentOptions
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.sampling import Sampling, SamplingKind
from longspec_jax.schema import unknown

__all__ = ["CallOptions", "GenerateOptions", "given_option", "resolve", "sequences_per_prompt"]

TRANSFORMERS_TOP_K = 50
"""The ``top_k`` with which transformers samples from a GenerationConfig that sets none."""

ADJUSTING = *PENALTIES, "logit_bias"
"""Options that adjust logits."""

_ANY = object()
_WITHOUT_EFFECT = (
    "transformers_version _from_model_config pad_token_id bos_token_id use_cache "
    "cache_implementation return_dict_in_generate early_stopping length_penalty tokenizer"
)
_NEUTRAL = {
    **dict.fromkeys(_WITHOUT_EFFECT.split(), _ANY),
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "typical_p": 1.0,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
}
"""Values at which unsupported options of transformers, vLLM and OpenAI's API change no token."""
_STOPS = "pass strings that end a row as stop_strings=, and the ids of stop tokens as eos_token_id="
_HINTS = {
    **dict.fromkeys(("stop", "stopping_criteria"), _STOPS),
    "stop_token_ids": "pass the ids of stop tokens as eos_token_id=",
    "attention_mask": "pass what the tokenizer returned, with its input_ids, as the prompt",
}
"""What to do instead of passing an option that is known elsewhere."""


def resolve(
    options: Mapping[str, Any],
    generation_config: GenerationConfig | None,
    prompt_lengths: Sequence[int],
    model_stop_tokens: Sequence[int],
    vocab_size: int,
) -> Request:
    """Check the options and give every row its values.

    Args:
      options: keyword arguments, see :class:`GenerateOptions`; they win over the configuration.
      generation_config: a transformers ``GenerationConfig``, or None.
      model_stop_tokens: what ends a row unless the caller says otherwise.
      vocab_size: width of the target's logits, below which stop tokens must lie.

    Returns:
      The options of all rows, on the host.

    Raises:
      TypeError: for an unknown option.
      ValueError: for a value of a wrong type or outside its range, a sequence that does not fit the
        batch, or an option that has no effect.
      NotImplementedError: for an option of transformers that is not supported.
    """
    given = _supported(_named(options), prompt_lengths)
    rows, merged = len(prompt_lengths), given
    if generation_config is not None:
        merged = {**_from_config(generation_config, prompt_lengths, given), **given}

    def option(name: str, dtype: DTypeLike) -> Any:
        declared = OPTIONS[name]
        if name not in merged:
            return np.full(rows, declared.default, dtype)
        return np.asarray(by_row(name, merged[name], rows, declared.rule), dtype)

    temperature, top_k = _temperature(merged, given, rows), option("top_k", np.int32)
    # A mass too small for float32 still leaves the most likely token.
    top_p = np.maximum(option("top_p", np.float32), np.finfo(np.float32).tiny)
    min_p = option("min_p", np.float64)
    filters = {"top_k": top_k > 0, "top_p": top_p < 1, "min_p": min_p > 0}
    if not temperature.any():
        _check_no_filter(given, filters)
    filtered = (temperature > 0) & np.any([*filters.values()], axis=0)
    with np.errstate(divide="ignore"):
        log_min_p = np.log(min_p).astype(np.float32)
    kind = SamplingKind.SAMPLED if temperature.any() else SamplingKind.GREEDY
    adjustments = None
    if not merged.keys().isdisjoint(ADJUSTING):
        adjustments = AdjustmentOptions.of(
            repetition=option("repetition_penalty", np.float32),
            presence=option("presence_penalty", np.float32),
            frequency=option("frequency_penalty", np.float32),
            biases=_biases(merged.get("logit_bias"), rows, vocab_size),
        )
        adjustments = None if adjustments.neutral else adjustments
    logprobs = _alternatives("logprobs", merged.get("logprobs"), rows)
    stops: Sequence[Sequence[int]] = [model_stop_tokens] * rows
    if "eos_token_id" in merged:
        stops = _stop_sets(merged["eos_token_id"], rows, vocab_size)
    if filtered.any() or adjustments is not None or logprobs is not None:
        kind = SamplingKind.ANY
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=option("seed", np.uint32),
        log_min_p=log_min_p,
        kind=kind,
    )
    return Request(
        sampling,
        _padded(stops),
        option("max_new_tokens", np.int32),
        adjustments=adjustments,
        logprobs=logprobs,
        prompt_logprobs=_alternatives("prompt_logprobs", merged.get("prompt_logprobs"), rows),
    )


def _biases(value: object, rows: int, vocab_size: int) -> list[dict[int, float]]:
    """Biases of every row, by token."""
    biases = [value or {}] * rows if value is None or isinstance(value, Mapping) else value
    if not isinstance(biases, Sequence) or not all(isinstance(one, Mapping) for one in biases):
        raise ValueError(
            f"logit_bias={shown(value)} must be a mapping of token ids to numbers, such as "
            "{198: -100}, or one for every prompt"
        )
    if len(biases) != rows:
        raise ValueError(
            f"logit_bias has {len(biases)} mappings for {rows} prompt{'s' * (rows != 1)}; pass one "
            "mapping, or one per prompt"
        )
    for row, given in enumerate(biases):
        for token, bias in given.items():
            if not is_whole(token) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"logit_bias has the token {shown(token)}{in_row(row, rows)}, and the target's "
                    f"vocabulary has the ids 0 to {vocab_size - 1}; pass token ids"
                )
            BIAS.read(f"logit_bias[{token}]", bias, row if rows > 1 else None)
    return [{int(token): float(bias) for token, bias in given.items()} for given in biases]


def _alternatives(name: str, value: object, rows: int) -> Any:
    """Alternatives that every row reports, -1 for no log-probabilities; None if no row does."""
    if value is None:
        return None
    plain = as_plain(value)
    several = isinstance(plain, Sequence) and not isinstance(plain, str)
    items = list(plain) if several else [plain]
    own_alone = [name == "prompt_logprobs" and item is True for item in items]
    neither = [item is None or (name == "prompt_logprobs" and item is False) for item in items]
    if all(neither):
        return None
    fixed = [one or other for one, other in zip(own_alone, neither, strict=True)]
    asked = [0 if known else item for item, known in zip(items, fixed, strict=True)]
    found = by_row(name, asked if several else asked[0], rows, OPTIONS[name].rule)
    return np.where(neither, -1, found).astype(np.int32)


def given_option(
    options: Mapping[str, Any], generation_config: GenerationConfig | None, name: str
) -> Any:
    """What a call gives for an option that is read by itself; None where it gives nothing.

    Args:
      options: keyword arguments of the call; they win over the configuration.
      generation_config: a transformers ``GenerationConfig``, or None.
    """
    value = options.get(name)
    return getattr(generation_config, name, None) if value is None else value


def sequences_per_prompt(value: object, request: Request) -> int:
    """How many rows every prompt has.

    Args:
      value: what the call asks for; None for one.
      request: the options of one row per prompt.

    Raises:
      ValueError: for what is not a whole number from 1, and for rows that would all be equal.
    """
    rule = OPTIONS["num_return_sequences"].rule
    count = 1 if value is None else rule.read("num_return_sequences", value)
    if count > 1 and not np.any(request.sampling.temperature):
        raise ValueError(
            f"num_return_sequences={count} gives equal rows at temperature 0; set temperature (or "
            "do_sample=True), or leave it out"
        )
    return count


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None.

    A name that neither this library nor transformers knows is refused, with the nearest one.
    """
    named = {}
    for name, value in options.items():
        if value is not None and name in _HINTS:
            raise NotImplementedError(f"{name}= is not supported: {_HINTS[name]}")
        if name not in {*OPTIONS, *_HINTS, *_NEUTRAL, "max_length"}:
            raise TypeError(unknown("generation option", name, OPTIONS))
        if value is not None:
            named[name] = value
    return named


def _from_config(
    config: GenerationConfig, prompt_lengths: Sequence[int], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The options that a transformers GenerationConfig sets."""
    if isinstance(config, type) or not hasattr(config, "to_diff_dict"):
        raise ValueError(
            f"generation_config must be a transformers GenerationConfig, got {shown(config)}; pass "
            "options as keyword arguments, such as max_new_tokens=64"
        )
    values = {key: value for key, value in config.to_diff_dict().items() if value is not None}
    # to_diff_dict leaves out the default, which transformers applies wherever it samples.
    top_k = getattr(config, "top_k", None)
    values["top_k"] = TRANSFORMERS_TOP_K if top_k is None else top_k
    if "max_new_tokens" in given:
        values.pop("max_length", None)
    supported = _supported(values, prompt_lengths, "generation_config.")
    # Without do_sample=True transformers decodes greedily, whatever the temperature says.
    return {"do_sample": False, **supported}


def _supported(
    values: Mapping[str, Any], prompt_lengths: Sequence[int], owner: str = ""
) -> dict[str, Any]:
    """The options of this library among those of transformers; others must have no effect."""
    found, refused = dict[str, Any](), list[str]()
    for key, value in values.items():
        if key in OPTIONS:
            found[key] = value
        elif key != "max_length" and _has_effect(key, value):
            refused.append(key)
    if "max_length" in values and "max_new_tokens" not in values:
        name = f"{owner}max_length"
        found["max_new_tokens"] = _rest(name, values["max_length"], prompt_lengths)
    if refused:
        named = ", ".join(f"{owner}{key}={shown(values[key])}" for key in sorted(refused))
        remedy = "leave out, or decode with transformers"
        if {"output_scores", "output_logits"} & {*refused}:
            remedy = "leave it out here; generate() itself takes output_scores= and output_logits="
        raise NotImplementedError(f"{named}: not supported by speculative decoding; {remedy}")
    return found


def _has_effect(name: str, value: object) -> bool:
    """Whether an option of transformers may change the output at this value."""
    neutral = _NEUTRAL.get(name)
    return neutral is not _ANY and not (isinstance(value, numbers.Real) and value == neutral)


def _rest(name: str, max_length: object, prompt_lengths: Sequence[int]) -> list[int]:
    """The new tokens that a limit on prompt and new tokens together leaves each row."""
    most = whole_number(name, max_length)
    for row, length in enumerate(prompt_lengths):
        if length >= most:
            raise ValueError(
                f"{name}={most} must exceed the {length} tokens of the prompt"
                f"{in_row(row, len(prompt_lengths))}, which it counts too; raise it, or pass "
                "max_new_tokens"
            )
    return [most - length for length in prompt_lengths]


def _temperature(merged: Mapping[str, Any], given: Mapping[str, Any], rows: int) -> Any:
    """Temperatures of the rows: 0 where ``do_sample`` chooses the most likely token."""
    sample = merged.get("do_sample")
    if sample is not None and not isinstance(sample, np.bool_):
        OPTIONS["do_sample"].rule.read("do_sample", sample)
    if "temperature" in given and "do_sample" not in given:
        sample = None  # A temperature in the call decides by itself whether to sample.
    array = np.full(rows, 1.0 if sample else 0.0, np.float32)
    if "temperature" in merged:
        values = by_row("temperature", merged["temperature"], rows, OPTIONS["temperature"].rule)
        array = np.asarray(values, np.float32)
    if sample is None or (sample and array.all()):
        return array
    if sample:
        raise ValueError("do_sample=True needs a temperature above 0; drop it for greedy decoding")
    if "temperature" in given and array.any():
        raise ValueError(
            f"do_sample=False draws the argmax, but temperature={given['temperature']} asks for "
            "samples; drop one of the two"
        )
    return np.zeros_like(array)


def _check_no_filter(given: Mapping[str, Any], acts: Mapping[str, np.ndarray]) -> None:
    """Refuse filters in a call that draws no samples."""
    for name, act in acts.items():
        if name in given and act.any():
            raise ValueError(
                f"{name}={given[name]} has no effect at temperature 0; set temperature (or "
                "do_sample=True), or leave it out"
            )


def _stop_sets(value: object, rows: int, vocab_size: int) -> list[list[int]]:
    """The stop tokens of every row, from an id, a set for all rows, or one for each."""
    value = as_plain(value)
    items = [value] if is_whole(value) else _listed(value)
    nested = [_listed(item) for item in items if not is_whole(item)]
    if nested and len(nested) < len(items):
        raise _no_stop_set(value)
    sets = nested if nested else [items] * rows
    if len(sets) != rows:
        raise ValueError(
            f"eos_token_id has {len(sets)} stop sets for {rows} prompt{'s' * (rows != 1)}; pass "
            "one set, or one per prompt"
        )
    for row, ids in enumerate(sets):
        for token in ids:
            if not is_whole(token):
                raise _no_stop_set(token)
            if token < 0:
                raise ValueError(
                    f"eos_token_id={ids} holds a negative id; pass eos_token_id=[] to never stop"
                )
            if token >= vocab_size:
                raise ValueError(
                    f"eos_token_id={token}{in_row(row, rows)} is outside the target's vocabulary "
                    f"of {vocab_size}, so no row would ever end with it; pass an id below, or "
                    "eos_token_id=[] to never stop"
                )
    return sets


def _padded(sets: Sequence[Sequence[int]]) -> Any:
    """``[B, n]`` the stop tokens of every row, padded with -1."""
    width = -(-max(1, *map(len, sets)) // 4) * 4  # In steps, to compile less.
    stops = np.full((len(sets), width), -1, np.int32)
    for row, ids in enumerate(sets):
        stops[row, : len(ids)] = ids
    return stops


def _listed(value: object) -> list[Any]:
    """The items of a list, a set or an array."""
    value = as_plain(value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise _no_stop_set(value)
    return list(value)


def _no_stop_set(value: object) -> ValueError:
    return ValueError(
        f"eos_token_id={shown(value)} must be a token id, a list of ids, or a list of ids for "
        "every prompt; tokenizer.convert_tokens_to_ids gives the id of a token"
    )
