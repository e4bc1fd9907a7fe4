"""The runs of a report, each under a name of its own."""

import os
from collections.abc import Sequence
from pathlib import Path

from ..eval.run_folder import read
from .blocks import NamedRun


def named_runs(folders: Sequence[Path]) -> list[NamedRun]:
    """Read runs; a folder's name is that of its run, with the folder around it if need be.

    Args:
      folders: of the runs, in the order they are reported.

    Raises:
      OSError: for a folder that holds no run.
      ValueError: for a run without a sample, a folder given twice, and a file that is no record.
    """
    real = [folder.expanduser().resolve() for folder in folders]
    for place, folder in enumerate(real):
        if folder in real[:place]:
            raise ValueError(
                f"{folders[place]} is given twice, so that its samples would count twice; name it "
                "once"
            )
    names = [folder.name for folder in real]
    if len(set(names)) < len(names):
        above = os.path.commonpath(real)
        names = [str(folder.relative_to(above)) for folder in real]
    runs = [NamedRun(name, read(folder)) for name, folder in zip(names, real, strict=True)]
    for folder, run in zip(folders, runs, strict=True):
        if not run.run.samples:
            raise ValueError(
                f"{folder} holds no finished sample yet; let the run go on with the command that "
                "began it"
            )
    return runs
