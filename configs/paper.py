"""The three training stages of the LongSpec paper (section 3.2 and appendix), for any target.

``short`` teaches a fresh draft on 1,024-token documents at anchor-offset positions, ``long`` goes on
with long documents at plain positions, and ``sft`` with long questions whose answers alone are
learned. Each variant is one stage with its own data and starts from the draft of the one before,
which ``--config.draft.init`` names if it is elsewhere. ``--config.data.files=PATHS`` replaces the hub
data by local files.

Hours in the configurations' docstrings are estimates, not measurements: floating-point operations of
target forward, draft forward and backward over all padded tokens, at half of an H200's bfloat16
matrix rate. Expected acceptance lengths are the paper's (its table of main results, temperature 0,
the paper's tree; bonus token included, prefill excluded).
"""

from typing import Any

from ml_collections import ConfigDict

from configs.common import base_config, stage

SHORT_LENGTH = 1024
SHORT_DATA = "DKYoon/SlimPajama-6B"
LONG_DATA = "sail/longspec-data/long_data.jsonl"
SFT_DATA = "sail/longspec-data/long_sft_data.jsonl"
COT_DATA = "sail/longspec-data/long_cot_data.jsonl"
"""Reasoning traces, for the QwQ models."""

VARIANTS = ("short", "long", "sft")


def paper_config(
    name: str,
    variant: str,
    *,
    target: str,
    long_length: int,
    max_offset: int,
    sft_data: str = SFT_DATA,
    **overrides: Any,
) -> ConfigDict:
    """A stage of the paper for a target.

    Args:
      name: of the configuration file; earlier stages are looked for in ``runs/NAME-STAGE/draft``.
      variant: ``short``, ``long`` or ``sft``.
      target: hub id of the frozen target.
      long_length: tokens of a row in the last two stages.
      max_offset: largest anchor offset of the first stage.
      sft_data: hub data of the last stage.
      **overrides: further fields of the configuration.
    """
    if variant not in VARIANTS:
        raise ValueError(f"{name} has no variant {variant!r}; choose one of {', '.join(VARIANTS)}")
    config = base_config()
    config.title = f"LongSpec draft for {target}, stage {variant}"
    config.target = target
    config.update(overrides)
    if variant == "short":
        config.data.hub = SHORT_DATA
        # 16 micro-batches of 128 rows: 16k tokens a device on eight devices.
        config.stages.short = stage(
            SHORT_LENGTH, 2048, 5e-4, accumulation=16, max_offset=max_offset
        )
        return config
    earlier = VARIANTS[VARIANTS.index(variant) - 1]
    config.draft.init = f"runs/{name}-{earlier}/draft"
    config.data.hub = LONG_DATA if variant == "long" else sft_data
    config.data.mask_prompts = variant == "sft"
    config.save_every = 20
    config.accept_every = 20
    # Micro-batches of eight rows: one long row a device on eight devices.
    config.stages[variant] = stage(long_length, 256, 5e-6, accumulation=32)
    return config
