"""Where text is promised to be the same with and without speculation."""

import dataclasses

import pytest

from longspec_jax.decoding import same_bits
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.ops import hardware
from longspec_jax.sharding import make_mesh
from tests.kit import tiny_target_config

WIDE = CachedTarget(tiny_target_config())
HALF = CachedTarget(tiny_target_config(dtype="bfloat16"))


def test_float32_is_identical_everywhere_but_not_in_every_bit() -> None:
    assert same_bits.is_identical(WIDE) and not same_bits.has_same_bits(WIDE)
    spread = dataclasses.replace(WIDE, mesh=make_mesh(data=2).abstract_mesh)
    assert same_bits.is_identical(spread)


def test_16_bits_are_identical_on_one_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not same_bits.is_identical(HALF)
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: True)
    monkeypatch.setattr(same_bits, "_attention_has_same_bits", lambda target: True)
    assert same_bits.is_identical(HALF) and same_bits.has_same_bits(HALF)
    for other in (
        dataclasses.replace(HALF, mesh=make_mesh(data=2).abstract_mesh),
        dataclasses.replace(HALF, offload=True),
    ):
        assert not same_bits.is_identical(other)
    monkeypatch.setattr(hardware, "compute_capability", lambda: (8, 0))
    assert not same_bits.is_identical(HALF)
