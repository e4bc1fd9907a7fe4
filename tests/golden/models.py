"""Tiny random models of many kinds, as folders that any version loads.

Written once, where a recording begins. A comparison only reads the folders.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

TREE, CHAIN = "4,5,3@9", "1,1,1,1"
RETRIEVAL = {
    "retrieve": 64,
    "retrieve_block": 8,
    "retrieve_sinks": 8,
    "retrieve_recent": 32,
    "retrieve_tree": "2,2",
}


class Models(NamedTuple):
    """What :meth:`longspec_jax.LongSpec.from_pretrained` is given, and how much is decoded."""

    target: str
    """A folder of the recording."""
    draft: str | list[str] | None
    """A folder of it, or the name of a kind without weights."""
    trees: tuple[str, ...]
    options: dict[str, Any] = {}
    whole: bool = False
    """All kinds of calls; else the two that differ most."""


FAMILIES = (
    *("gemma2", "gemma3", "glm4", "gpt-oss", "ministral", "mistral-window", "olmo2", "olmo3"),
    *("qwen3.5", "qwen3-next"),
)
MODELS: dict[str, Models] = {
    "plain": Models("llama", None, ("none",), whole=True),
    "longspec": Models("llama", "longspec", (TREE, CHAIN, "3,7,7,2", "2"), whole=True),
    "longspec-working": Models("llama", "longspec", (TREE,), {"working": 96}),
    "longspec-int8": Models("llama", "longspec", (TREE,), {"int8": True}),
    "longspec-retrieval": Models("llama", "longspec", (CHAIN,), RETRIEVAL),
    "small_lm": Models("llama", "small_lm", (TREE, "16x4@12+0.01"), whole=True),
    "eagle": Models("llama", "eagle", (TREE,)),
    "eagle3": Models("llama", "eagle3", (TREE, CHAIN), whole=True),
    "dflash": Models("llama", "dflash", ("4,5,3@9", "1,1,1")),
    "parallel": Models("llama", "parallel", ("4,5,3@9",)),
    "mtp": Models("mtp", "mtp", (TREE,)),
    "medusa": Models("llama", "medusa", ("4,5,3@9",)),
    "tokenswift": Models("tokenswift", "tokenswift", ("4,5,3@9",)),
    "ngram": Models("llama", "ngram", (CHAIN, "4,5,3@9"), whole=True),
    "suffix": Models("llama", "suffix", (CHAIN,)),
    "streaming": Models("llama", "streaming", (CHAIN,)),
    "streaming-retrieval": Models("llama", "streaming", (CHAIN,), RETRIEVAL),
    "joined": Models("llama", ["longspec", "ngram"], ("4,5,3@9~4",), whole=True),
    "joined-two": Models("llama", ["longspec", "small_lm"], ("4,5,3@9",)),
    **{
        f"family-{name}": Models(
            f"family-{name}", "streaming" if name[:4] != "qwen" else "ngram", ("3,2",)
        )
        for name in FAMILIES
    },
}
WIDE = {
    "wide": Models("wide", None, ("none",)),
    "wide-longspec": Models("wide", "wide-longspec", ("4,5,3@9",)),
    "wide-ngram": Models("wide", "ngram", ("1,1,1,1",)),
}
"""Of sizes that the GPU kernels take: lowered, and not decoded."""
TRAINED = {
    "demo": Models("demo", "demo", ("4,8,8@16", "4,4~8"), whole=True),
    "demo-small_lm": Models("demo", "demo_small_lm", ("1,1,1,1",)),
}
"""The models of the package, which speak: text, stop strings and high acceptance."""


def write_models(folder: Path) -> None:
    """Write the folders that :data:`MODELS` names."""
    from longspec_jax import save_draft, save_target
    from longspec_jax.drafters.checkpoints.dflash import save_draft as save_dflash
    from longspec_jax.drafters.checkpoints.eagle3 import save_draft as save_eagle3
    from longspec_jax.drafters.checkpoints.parallel import save_draft as save_parallel
    from longspec_jax.drafters.longspec import DraftConfig
    from tests.contrib import test_medusa, test_tokenswift
    from tests.decoding.lossless import CONFIG, SMALL
    from tests.drafters import test_eagle, test_mtp
    from tests.drafters.dflash import toys as dflash
    from tests.drafters.eagle3 import toys as eagle3
    from tests.drafters.parallel import toys as parallel
    from tests.kit import random_draft, random_target, tiny_target_config
    from tests.models.families import make_model

    save_target(folder / "llama", CONFIG, random_target(CONFIG))
    draft = DraftConfig.for_target(CONFIG, window=11)
    save_draft(folder / "longspec", draft, random_draft(draft), target=CONFIG)
    small = dataclasses.replace(SMALL, vocab_size=CONFIG.vocab_size)
    save_target(folder / "small_lm", small, random_target(small, seed=7))
    wide = tiny_target_config(
        num_layers=2, head_width=64, model_width=128, mlp_width=128, vocab_size=104, num_heads=4
    )
    save_target(folder / "wide", wide, random_target(wide))
    draft = DraftConfig.for_target(wide, window=64)
    save_draft(folder / "wide-longspec", draft, random_draft(draft), target=wide)
    test_eagle.published(folder / "eagle")
    own = eagle3.config_for(CONFIG, features=(0, 1))
    save_eagle3(folder / "eagle3", own, eagle3.random_params(own))
    own = dflash.config_for(CONFIG)
    save_dflash(folder / "dflash", own, dflash.random_params(own))
    own = parallel.config_for(CONFIG)
    save_parallel(folder / "parallel", own, parallel.random_tree(own), target=CONFIG)
    test_mtp.published(folder / "mtp", "mimo")
    test_medusa.published(folder / "medusa", test_medusa.DRAFTS["own"])
    test_tokenswift.published(folder / "tokenswift")
    for name in FAMILIES:
        make_model(name).save_pretrained(folder / f"family-{name}")
