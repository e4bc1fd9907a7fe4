"""Four optimiser steps of every kind that can be trained: losses and norms, bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from tests.train.drafts import steps as tiny
from tests.train.drafts import test_dflash as dflash
from tests.train.drafts import test_eagle3 as eagle3
from tests.train.drafts import test_longspec as longspec
from tests.train.drafts import test_parallel as parallel
from tests.train.drafts import test_small_lm as small_lm

KINDS: dict[str, Callable[..., Any]] = {
    "dflash": lambda: (dflash.SETTINGS, tiny.given(dflash.STAGE), dflash.batch(), 90),
    "dflash-causal": lambda: (dflash.JETSPEC, tiny.given(dflash.STAGE), dflash.batch(), 90),
    "eagle3": lambda: (eagle3.SETTINGS, eagle3.counted(), eagle3.batch(), 30),
    "longspec": lambda: (longspec.SETTINGS, tiny.given(longspec.STAGE), longspec.DATA, 30),
    "parallel": lambda: (parallel.SETTINGS, tiny.given(parallel.STAGE), parallel.DATA, 16),
    "small_lm": lambda: (small_lm.SETTINGS, tiny.given(small_lm.STAGE), small_lm.DATA, 90),
}
"""What the tests of each kind give to :func:`tests.train.drafts.steps.four_steps`."""


def recorded(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """Of every wanted kind: the metrics of its steps, as hexadecimal floats."""
    for name, given in KINDS.items():
        if wanted(name):
            steps = tiny.four_steps(*given()).metrics
            yield name, [{key: float(np.float32(v)).hex() for key, v in s.items()} for s in steps]


def lowered_step(name: str) -> str:
    """What XLA is given for a step of a kind."""
    make, texts = tiny.make_step, list[str]()

    def noting(*given: Any) -> Any:
        step: Any = make(*given)

        def run(*operands: Any) -> Any:
            texts.append(step.lower(*operands).as_text())
            return operands[0], jax.numpy.zeros(())

        return run

    with mock.patch.object(tiny, "make_step", noting):
        tiny.four_steps(*KINDS[name]())
    return texts[0]
