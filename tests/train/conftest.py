"""Runs of one test repeat each other's programs: each is compiled once."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental import compilation_cache


@pytest.fixture(scope="package", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    folder = tmp_path_factory.mktemp("compiled")
    for name, value in zip(names, (str(folder), 0.1), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.compilation_cache.reset_cache()
