"""Pickles of torch are read without torch, and hold nothing but tensors."""

import os
import pickle
import sys
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.weights.checkpoint import open_tensors
from longspec_jax.weights.pickles import MOST_DESCRIPTION
from tests.kit import each_row

torch = pytest.importorskip("torch", reason="writes the files")
FILE = "pytorch_model.bin"


def test_views_and_types_are_read_as_torch_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    state = {
        "whole": whole,
        "turned": whole.T,
        "part": whole[1:4, 3::2],
        "bfloat16": whole.to(torch.bfloat16),
        "half": torch.nn.Parameter(whole[2].half()),
        "offsets": torch.arange(-3, 4),
        "members": whole[0] > 5,
        "number": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    module = torch.nn.Linear(2, 3)
    torch.save(state | module.state_dict(), tmp_path / FILE)
    monkeypatch.setitem(sys.modules, "torch", None)
    with ExitStack() as stack:
        tensors = open_tensors(tmp_path, stack)
        assert tensors.keys() == {*state, "weight", "bias"}
        for name, expected in state.items():
            tensor, values = tensors[name], expected.detach()
            everything = tensor.read((slice(None),) * len(tensor.shape))
            if name == "bfloat16":
                assert everything.dtype == jnp.bfloat16
                everything, values = everything.astype(np.float32), values.float()
            np.testing.assert_array_equal(everything, values.numpy(), err_msg=name)
            assert tensor.shape == tuple(expected.shape)
        part = tensors["part"].read((slice(1, 3), slice(2, 4)))
        np.testing.assert_array_equal(part, whole[1:4, 3::2][1:3, 2:4].numpy())


class _Named:
    """A reference to a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def _without_its_end(folder: Path) -> None:
    """A storage that is shorter than its tensor, in a whole archive."""
    with zipfile.ZipFile(folder / FILE) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / FILE, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content[:8] if name.endswith("data/0") else content)


DESCRIPTIONS = {
    "no pickle": (pickle.dumps([1])[:-1], zipfile.ZIP_STORED),
    "compressed": (bytes(2**24), zipfile.ZIP_DEFLATED),
    "large": (bytes(MOST_DESCRIPTION + 1), zipfile.ZIP_STORED),
    # Memory for 2^32 places, asked for by eight bytes.
    "many places": (b"\x80\x02K\x01r\xff\xff\xff\x7f.", zipfile.ZIP_STORED),
    # Keys that every four bytes more take twice as long to hash, and every byte more stack.
    "twice": (b"\x80\x02}(K\x01" + b"q\x01h\x01\x86" * 24 + b"K\x01u.", zipfile.ZIP_STORED),
    "deep": (b"\x80\x02}K\x01" + b"\x85" * 20_000 + b"K\x01s.", zipfile.ZIP_STORED),
    "other codes": (pickle.dumps({"a": {1}}, protocol=4), zipfile.ZIP_STORED),
}
"""Bytes in place of the pickle, and how they are stored."""


@each_row("kind", ["code", "short", "other object", *DESCRIPTIONS])
def test_what_is_no_tensor_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of it runs."""
    monkeypatch.chdir(tmp_path)
    content = {"code": {"a": _Named()}, "other object": {"a": torch.device("cpu")}}
    torch.save(content.get(kind, {"a": torch.ones(4)}), tmp_path / FILE)
    if kind == "short":
        _without_its_end(tmp_path)
    if kind in DESCRIPTIONS:
        with zipfile.ZipFile(tmp_path / FILE, "w") as archive:
            archive.writestr("x/data.pkl", *DESCRIPTIONS[kind])
    words = {
        "code": r"holds more than tensors.*it names \w+\.system",
        "short": "storage '0' is shorter than its tensors",
        "no pickle": "is damaged",
        "compressed": "data.pkl is compressed, which torch.save never does",
        "large": "data.pkl has 16777217 bytes and may have 16777216",
        "many places": "holds a value of type int",
        "twice": "a key is not a text",
        "deep": "a key is not a text",
        "other codes": "KeyError: 143",
        "other object": "it names torch.device, which is not a tensor",
    }
    with ExitStack() as stack, pytest.raises(ValueError, match=words[kind]):
        open_tensors(tmp_path, stack)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_before_zip_archives_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / FILE, _use_new_zipfile_serialization=False)
    with ExitStack() as stack, pytest.raises(ValueError, match="torch before 1.6.* safetensors"):
        open_tensors(tmp_path, stack)


def test_a_file_that_holds_more_is_not_downloaded_again(tmp_path: Path) -> None:
    """It would be the same: only safetensors, or a file of only tensors, can be loaded."""
    torch.save({"a": torch.ones(4), "epoch": torch.device("cpu")}, tmp_path / FILE)
    words = "download it again if it is damaged, else take the model's safetensors"
    with ExitStack() as stack, pytest.raises(ValueError, match=words):
        open_tensors(tmp_path, stack)
