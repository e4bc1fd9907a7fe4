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


def test_16_bits_are_identical_where_the_kernels_are_taken() -> None:
    assert not same_bits.is_identical(HALF)
    assert same_bits.is_identical(dataclasses.replace(HALF, same_bits=True))


def test_the_kernels_serve_one_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    target = CachedTarget(tiny_target_config(dtype="bfloat16", head_width=64), same_bits=True)
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.x"):
        same_bits.require_same_bits(target)
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: True)
    same_bits.require_same_bits(target)
    for other in (
        dataclasses.replace(target, mesh=make_mesh(data=2).abstract_mesh),
        dataclasses.replace(target, offload=True),
        dataclasses.replace(target, attention="xla"),
    ):
        with pytest.raises(NotImplementedError, match="same_bits needs one device"):
            same_bits.require_same_bits(other)
    narrow = dataclasses.replace(target, config=HALF.config)
    with pytest.raises(NotImplementedError, match="neither 64 nor 128"):
        same_bits.require_same_bits(narrow)
    monkeypatch.setattr(hardware, "compute_capability", lambda: (8, 0))
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.x"):
        same_bits.require_same_bits(target)
