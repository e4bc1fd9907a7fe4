"""The kernels of every GPU: those the page names, none that cannot run, none slow in silence."""

import importlib.util
import subprocess
import sys

import jax
import pytest

from longspec_jax.decoding import batch_invariant
from longspec_jax.ops import hardware
from longspec_jax.ops.hardware import AMPERE, HOPPER, mosaic_is_supported
from tests.kit import each_row
from tests.ops import gpus

PLUGIN = any(
    importlib.util.find_spec(name) is not None
    for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")
)
WITHOUT_TRITON = {
    "attention, a plain step",
    "attention, a tree",
    "attention, a prompt's chunk",
    "draft: its window",
    "draft: the target's cache",
    "norms",
    "heads and rotary",
    "appending to the cache",
    "choosing continuations",
}
"""What other kernels serve where this jax lacks Triton's."""
ALONG_PATHS = {"attention, a tree, in one order", "attention, window, cap and sinks, in one order"}
IN_ONE_ORDER = ALONG_PATHS | {"matmuls in one order", "LM head in one order"}


@pytest.mark.slow
def test_the_page_names_what_every_op_takes() -> None:
    found = {capability: gpus.taken(capability) for capability in gpus.GPUS}
    assert found == gpus.documented(), "run python -m tests.ops.gpus"


@pytest.mark.slow
@each_row("capability", gpus.GPUS)
def test_what_is_chosen_can_run(capability: gpus.Capability) -> None:
    """Hopper's instructions are only on 9.x, and all of our kernels need Ampere's."""
    taken = gpus.taken(capability)
    mosaic = mosaic_is_supported() and capability >= AMPERE
    hopper = capability[0] == HOPPER[0] and mosaic
    assert any("Hopper" in kernels for kernels in taken.values()) == hopper
    other = IN_ONE_ORDER if mosaic and not hopper else set()
    assert {name for name, kernels in taken.items() if "Ampere" in kernels} == other
    # Refused, so that nobody is promised equal bits.
    refused = set() if mosaic else ALONG_PATHS
    assert {name for name, kernels in taken.items() if kernels == "–"} == refused
    attends = [name for name in taken if name.startswith(("attention", "draft"))]
    assert len(attends) == 10
    for name in attends:
        assert (taken[name] != "XLA") == (capability >= AMPERE or taken[name] == "–"), name


@pytest.mark.slow
@pytest.mark.skipif(not mosaic_is_supported(), reason="needs jax 0.11 or newer")
def test_what_needs_no_triton() -> None:
    usual, found = gpus.taken((8, 9)), gpus.taken((8, 9), triton=False)
    changed = {name for name, kernels in found.items() if kernels != usual[name]}
    assert changed == WITHOUT_TRITON
    assert {found[name] for name in changed} == {"Ampere"}
    assert {usual[name] for name in changed} == {"Triton"}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(not PLUGIN, reason="needs jax-cuda13-plugin and jax-cuda13-pjrt")
@pytest.mark.parametrize("capability", gpus.GPUS, ids=lambda each: f"{each[0]}.{each[1]}")
def test_kernels_assemble_and_fit(capability: gpus.Capability) -> None:
    """XLA compiles every call to machine code for a GPU that is not there."""
    if capability == HOPPER:
        pytest.skip("Hopper's kernels run on such a GPU in the tests marked gpu")
    # A process for each: Mosaic in jaxlib 0.12 goes on for the first GPU it compiled for.
    script = f"from tests.ops import gpus; gpus.assemble_all({capability})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@each_row(
    ("capability", "version", "said"),
    [
        (None, (0, 10, 2), None),
        ((7, 5), (0, 12, 0), "7.5 has no bfloat16 .* best in float16"),
        ((8, 0), (0, 10, 2), None),
        ((9, 0), (0, 10, 2), "no Hopper kernels: .* Install jax 0.11 or newer"),
        ((9, 0), (0, 11, 2), None),
        ((10, 0), (0, 12, 0), None),
        ((12, 0), (0, 12, 0), None),
    ],
)
def test_what_is_slow_is_said_once(
    capability: gpus.Capability | None,
    version: tuple[int, ...],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setattr(hardware, "compute_capability", lambda: capability)
    monkeypatch.setattr(jax, "__version_info__", version)
    batch_invariant.warn_of_missing_kernels.cache_clear()
    try:
        if said is None:
            batch_invariant.warn_of_missing_kernels()
            assert not recwarn.list
            return
        with pytest.warns(UserWarning, match=said):
            batch_invariant.warn_of_missing_kernels()
        batch_invariant.warn_of_missing_kernels()
        assert not recwarn.list
    finally:
        batch_invariant.warn_of_missing_kernels.cache_clear()


def test_a_jax_without_triton_is_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "compute_capability", lambda: (8, 0))
    assert hardware.triton_comes_first()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not hardware.triton_comes_first()
    assert "lacks Pallas' Triton backend" in (hardware.missing_kernels() or "")
