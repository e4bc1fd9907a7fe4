"""The values every configuration starts from: the paper's optimiser and transforms.

``train/config.py`` says what each field means. A configuration file overrides what differs for its
target.
"""

from typing import Any

from ml_collections import ConfigDict

LLAMA_TURN = "<s>{role}\n{content}</s>\n"
"""The turn format of the LongSpec release for Llama, Vicuna and LongChat (not their own templates)."""
CHATML_TURN = "<|im_start|>{role}\n{content}<|im_end|>\n"
"""The turn format of Qwen and QwQ."""


def base_config() -> ConfigDict:
    """All fields but the target's own."""
    return ConfigDict(
        dict(
            seed=42,
            target="",
            revision="",
            dtype="bfloat16",
            export="",
            title="LongSpec draft",
            loss_chunk=8192,
            log_every=1,
            save_every=200,
            accept_every=100,
            accept_rows=8,
            accept_seq_len=0,
            max_to_keep=2,
            mesh=dict(data=1, fsdp=-1, tp=1),
            data=dict(
                files="",
                hub="",
                split="train",
                pack=False,
                mask_prompts=False,
                answer_room=1024,
                turn=LLAMA_TURN,
                synthetic_rows=0,
            ),
            draft=dict(
                window=512,
                init="",
                anchor_offset=True,
                max_sinks=4,
                max_shift=4,
                per_row=True,
            ),
            optimizer=dict(
                b1=0.9,
                b2=0.95,
                eps=1e-6,
                clip=1.0,
                weight_decay=0.1,
                decay_all=False,
                warmup=0.1,
                floor=1e-4,
            ),
            stages=dict(),
        )
    )


def stage(seq_len: int, batch: int, learning_rate: float, **overrides: Any) -> dict[str, Any]:
    """A stage of one epoch unless limits are given."""
    fields = dict(
        seq_len=seq_len,
        batch=batch,
        accumulation=1,
        learning_rate=learning_rate,
        steps=0,
        epochs=0 if {"steps", "max_seconds"} & set(overrides) else 1,
        max_seconds=0.0,
        max_offset=0,
    )
    return {**fields, **overrides}
