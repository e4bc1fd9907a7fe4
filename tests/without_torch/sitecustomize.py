"""Hides PyTorch from a Python process whose ``PYTHONPATH`` names this folder.

The commands do not need it, and the tests have it only as an oracle. But transformers imports it
where it can, which takes every process more than two seconds.
"""

import sys
from importlib.machinery import PathFinder


class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname == "torch" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
