"""How the commands are typed, so that their messages say what the user can repeat.

A checkout runs them as modules of its own folders (``python -m infer.decode``). Installed, the same
files lie under the library's name, and a script stands for each.
"""

SCRIPTS = {
    "infer.bench": "longspec-bench",
    "infer.decode": "longspec-decode",
    "infer.eval": "longspec-eval",
    "infer.report": "longspec-report",
    "train.plot": "longspec-plot",
    "train.prepare": "longspec-prepare",
    "train.regenerate": "longspec-regenerate",
    "train.run": "longspec-train",
    "train.vocabulary": "longspec-vocabulary",
}
"""Module of the checkout to the script that ``pyproject.toml`` installs."""


def command_name(package: str | None, module: str = "") -> str:
    """What was typed to run a module of ``__package__``, or the package itself."""
    dotted = ".".join(filter(None, (package, module)))
    name = dotted.removeprefix("longspec_jax.")
    return SCRIPTS[name] if name != dotted else f"python -m {name}"
