"""Packages that only an extra installs, and the message where one is missing.

The commands ask here, so that a missing package is answered by what to type and not by a traceback.
"""

import importlib.util
from importlib import metadata

DISTRIBUTION = "longspec_jax"
PURPOSES = {
    "train": "training needs",
    "charts": "reports need",
    "eval": "scores need",
    "serve": "serving needs",
    "grammar": "JSON schemas and regular expressions need",
    "tensorboard": "--config.log.tensorboard needs",
    "wandb": "--config.log.wandb needs",
    "torch": "comparing with PyTorch needs",
}
"""What an extra is for, beginning the sentence."""
MODULES = {
    "absl": "train",
    "datasets": "train",
    "ml_collections": "train",
    "optax": "train",
    "orbax": "train",
    "pyarrow": "train",
    "tqdm": "train",
    "matplotlib": "charts",
    "pandas": "charts",
    "rapidfuzz": "eval",
    "rouge": "eval",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "llguidance": "grammar",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "torch": "torch",
}
"""Importable names the commands use and the extra that installs each."""
FOR_SOME_DATA = {"datasets", "pyarrow"}
"""Those that only hub data sets, packed files and parquet need; ``datasets`` installs both."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to type when an import failed; None for a module that belongs to no extra."""
    module = (error.name or "").partition(".")[0]
    return _sentence(MODULES[module], [module]) if module in MODULES else None


def missing_packages(extra: str) -> str | None:
    """What to type before anything of an extra is imported; None if all of it is installed.

    Those of :data:`FOR_SOME_DATA` are asked for by what reads such data.
    """
    modules = {module for module, its_extra in MODULES.items() if its_extra == extra}
    needed = sorted(modules - FOR_SOME_DATA)
    absent = [module for module in needed if importlib.util.find_spec(module) is None]
    return _sentence(extra, absent) if absent else None


def _sentence(extra: str, modules: list[str]) -> str:
    return (
        f"{PURPOSES[extra]} packages that are not installed ({', '.join(modules)}): "
        f"pip install {_requirement(extra)}"
    )


def _requirement(extra: str) -> str:
    """What pip is given: a checkout that was never installed has no name pip could look up."""
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"-e '.[{extra}]'"
    return f"'{DISTRIBUTION}[{extra}]'"
