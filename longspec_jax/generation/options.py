"""Generation options under their Hugging Face names, checked, one value a row.

Everything may be a scalar for all rows or a sequence with one value a row. What speculative decoding
cannot honour (beams, penalties, constraints) is refused by name, never ignored.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding.engine import Request
from longspec_jax.decoding.sampling import Sampling

DEFAULT_NEW_TOKENS = 256


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``stream``."""

    max_new_tokens: int | Sequence[int]
    """Most tokens to emit; 256 if absent."""
    do_sample: bool
    """False draws the argmax; if absent, a temperature above 0 samples."""
    temperature: float | Sequence[float]
    """0 draws the argmax. 0 if absent, 1 with ``do_sample=True``."""
    top_k: int | Sequence[int]
    """Only the ``k`` most likely tokens can be drawn; 0 for all."""
    top_p: float | Sequence[float]
    """Only the smallest set of most likely tokens with this mass; 1 for all."""
    seed: int | Sequence[int]
    """The row's random stream, the same for every row if one number is given; 0 if absent."""
    eos_token_id: int | Sequence[int] | Sequence[Sequence[int]]
    """Tokens that end a row, or one set a row; the model's own if absent, ``[]`` for none."""


_HARMLESS = {
    # Bookkeeping, or what changes how transformers computes and not what it emits.
    *("transformers_version", "_from_model_config", "pad_token_id", "bos_token_id", "use_cache"),
    *("cache_implementation", "max_cache_len", "return_dict_in_generate", "prefill_chunk_size"),
    *("disable_compile", "compile_config", "low_memory", "is_assistant"),
}
_NEUTRAL = {
    # Values with which an unsupported option does nothing.
    **{"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "repetition_penalty": 1.0},
    **{"length_penalty": 1.0, "diversity_penalty": 0.0, "no_repeat_ngram_size": 0, "min_length": 0},
    **{"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "early_stopping": False},
    **{"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0},
    **{"renormalize_logits": False, "remove_invalid_values": False, "token_healing": False},
    **{"output_attentions": False, "output_hidden_states": False, "output_scores": False},
    **{"output_logits": False, "min_new_tokens": 0},
}


@dataclass(frozen=True)
class RowOptions:
    """Options resolved to one value a row."""

    max_new_tokens: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    seed: np.ndarray
    stop_tokens: tuple[tuple[int, ...], ...]

    def request(self) -> Request:
        """The arrays the decode loop takes; stop sets are padded to few widths, few compiles."""
        widest = max(map(len, self.stop_tokens))
        stops = np.full((len(self.stop_tokens), -(-max(widest, 1) // 4) * 4), -1, np.int32)
        for row, tokens in zip(stops, self.stop_tokens, strict=True):
            row[: len(tokens)] = tokens
        vary = self.temperature > 0
        sampling = Sampling(
            temperature=jnp.asarray(self.temperature),
            top_k=jnp.asarray(self.top_k),
            top_p=jnp.asarray(self.top_p),
            seed=jnp.asarray(self.seed),
            stochastic=bool(vary.any()),
            filtered=bool((vary & ((self.top_k > 0) | (self.top_p < 1))).any()),
        )
        return Request(sampling, jnp.asarray(stops), jnp.asarray(self.max_new_tokens))


def resolve(
    options: Mapping[str, Any],
    generation_config: Any,
    prompt_lengths: Sequence[int],
    model_stop_tokens: Sequence[int],
) -> RowOptions:
    """Check the options and give every row its values.

    Args:
      options: keyword arguments, see :class:`GenerateOptions`; they win over the configuration.
      generation_config: a transformers ``GenerationConfig``, or None.
      prompt_lengths: tokens of every prompt.
      model_stop_tokens: what ends a row unless the caller says otherwise.

    Raises:
      TypeError: for an unknown option.
      ValueError: for a value outside its range, or a sequence that does not fit the batch.
      NotImplementedError: for an option of transformers that is not supported.
    """
    _check_names(options)
    given = {key: value for key, value in options.items() if value is not None}
    merged = {**_from_config(generation_config, prompt_lengths), **given}
    batch = len(prompt_lengths)

    def rows(name: str, default: Any, dtype: Any) -> np.ndarray:
        return _per_row(name, merged.get(name, default), batch, dtype)

    resolved = RowOptions(
        max_new_tokens=rows("max_new_tokens", DEFAULT_NEW_TOKENS, np.int32),
        temperature=_temperature(merged, given, batch),
        top_k=rows("top_k", 0, np.int32),
        top_p=rows("top_p", 1.0, np.float32),
        seed=_seeds(merged.get("seed", 0), batch),
        stop_tokens=_stop_sets(merged.get("eos_token_id", model_stop_tokens), batch),
    )
    _check_range("max_new_tokens", resolved.max_new_tokens, resolved.max_new_tokens >= 1, ">= 1")
    _check_range("top_k", resolved.top_k, resolved.top_k >= 0, ">= 0 (0 keeps all tokens)")
    _check_range("top_p", resolved.top_p, (resolved.top_p > 0) & (resolved.top_p <= 1), "in (0, 1]")
    return resolved


def _check_names(options: Mapping[str, Any]) -> None:
    known = list(GenerateOptions.__annotations__)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise TypeError(f"unknown generation option {name!r}; {hint}")


def _from_config(config: Any, prompt_lengths: Sequence[int]) -> dict[str, Any]:
    """The options a transformers GenerationConfig sets; refuses those that cannot be honoured."""
    if config is None:
        return {}
    values = {key: value for key, value in config.to_diff_dict().items() if value is not None}
    # transformers 4 has a default top-k of 50, which its difference to the defaults leaves out.
    if getattr(config, "do_sample", None) and getattr(config, "top_k", None):
        values["top_k"] = config.top_k
    longest = values.pop("max_length", None)
    if longest is not None and "max_new_tokens" not in values:
        values["max_new_tokens"] = [longest - length for length in prompt_lengths]
    supported = {key: values.pop(key) for key in GenerateOptions.__annotations__ if key in values}
    # Without do_sample=True transformers decodes greedily, whatever the temperature says.
    supported.setdefault("do_sample", False)
    refused = {
        key: value
        for key, value in values.items()
        if key not in _HARMLESS and _NEUTRAL.get(key, ...) != value
    }
    if refused:
        raise NotImplementedError(
            f"the generation config sets {refused}, which speculative decoding does not support; "
            "remove it from the config, or decode with transformers"
        )
    return supported


def _temperature(merged: Mapping[str, Any], given: Mapping[str, Any], batch: int) -> np.ndarray:
    """Temperatures of the rows, with ``do_sample`` worked in."""
    sample = merged.get("do_sample")
    if "temperature" in given and "do_sample" not in given:
        sample = None  # An explicit temperature says by itself whether to sample.
    default = 1.0 if sample else 0.0
    values = _per_row("temperature", merged.get("temperature", default), batch, np.float32)
    _check_range(
        "temperature", values, np.isfinite(values) & (values >= 0), ">= 0 (0 is greedy) and finite"
    )
    if sample is False:
        if "temperature" in given and values.any():
            raise ValueError(
                f"do_sample=False draws the argmax, but temperature={given['temperature']} asks for "
                "samples; drop one of the two"
            )
        return np.zeros_like(values)
    if sample and not values.all():
        raise ValueError("do_sample=True needs a temperature above 0; drop it for greedy decoding")
    return values


def _per_row(name: str, value: Any, batch: int, dtype: Any) -> np.ndarray:
    """A scalar repeated for every row, or a sequence checked against their number."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} must be a number, or one number a row") from None
    if array.ndim > 1 or (array.ndim == 1 and len(array) != batch):
        raise ValueError(
            f"{name} has {array.size} values for {batch} prompts; pass one number, or one a prompt"
        )
    if np.issubdtype(dtype, np.integer) and (array != np.floor(array)).any():
        raise ValueError(f"{name}={value!r} must be an integer")
    return np.broadcast_to(array, (batch,)).astype(dtype)


def _seeds(value: Any, batch: int) -> np.ndarray:
    seeds = np.broadcast_to(_per_row("seed", value, batch, np.float64), (batch,))
    _check_range("seed", seeds, (seeds >= 0) & (seeds < 2**32), "in [0, 2**32)")
    return seeds.astype(np.uint32)


def _stop_sets(value: Any, batch: int) -> tuple[tuple[int, ...], ...]:
    """One tuple of stop tokens a row, from an id, a set for all rows, or a set for each."""
    items: list[Any] = [value] if isinstance(value, int | np.integer) else list(value)
    nested = any(isinstance(item, Sequence | set | np.ndarray) for item in items)
    sets = [tuple(map(int, row)) for row in items] if nested else [tuple(map(int, items))] * batch
    if len(sets) != batch:
        raise ValueError(
            f"eos_token_id has {len(sets)} stop sets for {batch} prompts; pass one set, or one a prompt"
        )
    for row in sets:
        if any(token < 0 for token in row):
            raise ValueError(
                f"eos_token_id={list(row)} holds a negative id; pass eos_token_id=[] to never stop"
            )
    return tuple(sets)


def _check_range(name: str, values: np.ndarray, good: np.ndarray, rule: str) -> None:
    for row in np.flatnonzero(~good):
        raise ValueError(f"{name}={values[row].item():g} of row {row} must be {rule}")
