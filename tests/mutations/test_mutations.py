"""The list of mutations fits the code; ``python -m tests.mutations`` runs it."""

from pathlib import Path

import pytest

from tests.kit import each_row
from tests.mutations import Mutation, mutations


def test_every_mutation_fits_the_code() -> None:
    listed = mutations()
    assert len(listed) >= 20 and len({each.name for each in listed}) == len(listed)
    for mutation in listed:
        mutation.check_fits()
        assert mutation.new != mutation.old


@each_row("text", ["", "x = 1\nx = 1\n"])
def test_code_that_has_changed_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ValueError, match="a.py, and must occur once"):
        Mutation("m", "a.py", "x = 1", "x = 2", []).apply(tmp_path)
