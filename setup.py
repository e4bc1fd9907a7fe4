"""Where the commands lie in a wheel, which ``pyproject.toml`` cannot say for folders yet to come.

``train/``, ``infer/`` and ``configs/`` are folders of the checkout, and too common as names to
install: the wheel holds them as ``longspec_jax.train`` and so on. They import each other
relatively.
"""

from setuptools import find_packages, setup

LIBRARY, COMMANDS = "longspec_jax", ("train", "infer", "configs")

moved = find_packages(include=[pattern for name in COMMANDS for pattern in (name, f"{name}.*")])
setup(
    packages=find_packages(include=[LIBRARY, f"{LIBRARY}.*"])
    + [f"{LIBRARY}.{package}" for package in moved],
    package_dir={f"{LIBRARY}.{name}": name for name in COMMANDS},
)
