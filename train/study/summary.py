"""What the measurements of several drafts and seeds come to, as lines of text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..acceptance import implied_length
from .decoding import by_depth
from .statistics import mean_and_error, smoothed, steps_to

Study = dict[str, Any]
"""``{"target": ..., "drafts": {"NAME-SEED": ...}}``, as :mod:`train.reproduce` writes it."""


def summary(studies: Sequence[Study], baseline: str) -> str:
    """All tables, every variant beside the baseline of the same seed.

    Args:
      studies: one for every target, measured alike.
      baseline: the variant that others are compared with.
    """
    drafts = by_variant([study["drafts"] for study in studies])
    lines = [line for study in studies for line in _target(study["target"])]
    for title, measure in _measures(studies[0]).items():
        lines += ["", title]
        for variant, seeds in drafts.items():
            lines.append(_line(variant, seeds, drafts.get(baseline, {}), measure))
    if baseline in drafts:
        lines += ["", f"steps of the long stage until {baseline}'s last loss, by seed"]
        lines += _steps_to_equal_loss(drafts, baseline)
    return "\n".join(lines)


def by_variant(studies: Sequence[Mapping[str, Any]]) -> dict[str, dict[tuple[int, str], Any]]:
    """Drafts by what they vary, then by target and seed.

    The first study's ``offset-1`` is ``(0, "1")`` of ``offset``.
    """
    found: dict[str, dict[tuple[int, str], Any]] = {}
    for target, drafts in enumerate(studies):
        for name, values in drafts.items():
            variant, _, seed = name.rpartition("-")
            found.setdefault(variant, {})[target, seed] = values
    return found


def _target(target: Mapping[str, Any]) -> Iterator[str]:
    shares = target["attention_to_anchors"]
    yield (
        f"target: attention to the first 4 positions {np.mean(shares):.3f} over layers, "
        f"{shares[-1]:.3f} in the last; loss by positions:"
    )
    plain = target["losses"]["plain"]
    for name, losses in target["losses"].items():
        mean, _ = mean_and_error(losses)
        difference, error = mean_and_error(np.subtract(losses, plain))
        yield f"  {name:16s} {mean:.4f}   {difference:+.5f} +- {error:.5f} over plain"


def _measures(study: Study) -> dict[str, Callable[[Mapping[str, Any]], float]]:
    """Titles and what each says of a draft."""
    some = next(iter(study["drafts"].values()))
    found: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "training loss, mean over the long stage": lambda d: float(
            np.mean(d["curve"]["draft_long"]["loss"])
        ),
        "training loss, last steps of the long stage": lambda d: float(
            smoothed(d["curve"]["draft_long"]["loss"])[-1]
        ),
    }
    for context in some["scores"]["contexts"]:
        found[f"held-out loss, {context} tokens of context"] = lambda d, c=context: float(
            np.mean(d["scores"]["contexts"][c]["loss"])
        )
        found[f"simulated chain length, {context} tokens of context"] = lambda d, c=context: (
            implied_length(np.mean(d["scores"]["contexts"][c]["agreement"], axis=1))
        )
    for kind in ("new", "near", "far"):
        found[f"held-out loss, {kind} tokens"] = lambda d, k=kind: float(
            np.mean(d["scores"]["copies"][k]["loss"])
            / (d["scores"]["copies"][k]["tokens"] or np.nan)
        )
    for temperature, contexts in some.get("decoding", {}).items():
        for context in contexts:
            found[f"decoding, T={temperature}, {context} tokens of context: tokens per pass"] = (
                lambda d, t=temperature, c=context: (
                    d["decoding"][t][c]["tokens"] / d["decoding"][t][c]["target_passes"]
                )
            )
        for depth in range(len(by_depth(next(iter(contexts.values()))["histogram"]))):
            found[f"decoding, T={temperature}, acceptance at depth {depth + 1}"] = (
                lambda d, t=temperature, n=depth: by_depth(_histogram(d["decoding"][t]))[n]
            )
    return found


def _histogram(contexts: Mapping[str, Any]) -> list[int]:
    return np.sum([each["histogram"] for each in contexts.values()], axis=0).tolist()


def _line(
    variant: str,
    seeds: Mapping[tuple[int, str], Any],
    baseline: Mapping[tuple[int, str], Any],
    measure: Callable[[Mapping[str, Any]], float],
) -> str:
    """A variant's mean over seeds, and its difference from the baseline, paired by seed."""
    values = {seed: measure(values) for seed, values in seeds.items()}
    line = f"  {variant:12s} {_with_error(list(values.values()), '')}"
    common = [seed for seed in values if seed in baseline]
    if seeds is baseline or not common:
        return line
    return f"{line}   {_with_error([values[s] - measure(baseline[s]) for s in common], '+')}"


def _with_error(values: Sequence[float], sign: str) -> str:
    """A mean and its standard error, which a single value does not have."""
    mean, error = mean_and_error(values)
    return f"{mean:{sign}.4f} " + ("(one seed)" if len(values) == 1 else f"+- {error:.4f}")


def _steps_to_equal_loss(
    drafts: Mapping[str, Mapping[tuple[int, str], Any]], baseline: str
) -> Iterator[str]:
    """For every variant and seed the long stage's steps until the baseline's last loss."""
    levels = {
        seed: float(smoothed(values["curve"]["draft_long"]["loss"])[-1])
        for seed, values in drafts[baseline].items()
    }
    for variant, seeds in drafts.items():
        steps = [
            steps_to(values["curve"]["draft_long"]["loss"], levels[seed])
            for seed, values in seeds.items()
            if seed in levels
        ]
        yield f"  {variant:12s} {', '.join(map(str, steps))}"
