"""What a command starts during its imports; a failure is raised where devices are asked for."""

import threading

import jax
import pytest

from infer.models import start_devices


def test_devices_start_in_a_thread_and_are_there_afterwards() -> None:
    devices = start_devices()
    devices.join(timeout=60)
    assert not devices.is_alive() and devices.daemon and jax.devices()


def test_what_fails_there_is_raised_where_devices_are_asked_for(monkeypatch) -> None:
    """An error in a thread would be printed; a warning of it is an error in these tests."""
    asked = []

    def fail() -> None:
        asked.append(threading.current_thread())
        raise RuntimeError("no device")

    monkeypatch.setattr(jax, "devices", fail)
    start_devices().join(timeout=60)
    assert asked and asked[0] is not threading.current_thread()
    with pytest.raises(RuntimeError, match="no device"):
        jax.devices()
