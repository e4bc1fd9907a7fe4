"""Drafts of modules outside the library, named ``MODULE:FOLDER``."""

from pathlib import Path

import pytest

from infer.arguments import Models
from infer.models import fetch
from longspec_jax.drafters.registry import kind_of_module, split_module
from longspec_jax.loading import choose_drafts
from tests.contrib.test_medusa import DRAFTS, published


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("contrib.medusa:runs/heads", ("contrib.medusa", "runs/heads")),
        ("mine:owner/name", ("mine", "owner/name")),
        ("owner/name", ("", "owner/name")),
        ("runs/a:b", ("", "runs/a:b")),
        ("./mine:b", ("", "./mine:b")),
        ("ngram", ("", "ngram")),
        (Path("mine:b"), ("", Path("mine:b"))),
    ],
)
def test_a_module_stands_before_a_colon(source: str | Path, found: tuple) -> None:
    assert split_module(source) == found


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("absent_module", "cannot be imported .No module named 'absent_module'.; run from the"),
        ("json", "json has no KIND; docs/guides/drafts.md says"),
    ],
)
def test_a_module_without_a_kind_is_refused(module: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind_of_module(module)


def test_files_of_such_a_kind_name_its_module(tmp_path: Path) -> None:
    published(tmp_path, DRAFTS["own"])
    with pytest.raises(ValueError, match=f"not installed with it; name contrib.medusa:{tmp_path}"):
        choose_drafts([tmp_path], {})


def test_a_command_fetches_the_folder_behind_the_module(tmp_path: Path) -> None:
    published(tmp_path, DRAFTS["own"])
    draft = f"contrib.medusa:{tmp_path}"
    assert fetch(Models(str(tmp_path), [draft])) == (tmp_path, [draft])
    with pytest.raises(OSError, match="--draft: /nowhere/at/all"):
        fetch(Models(str(tmp_path), ["contrib.medusa:/nowhere/at/all"]))
