"""Needed operations of known models, and the share of a device's peak."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from longspec_jax.config.known import TARGETS
from longspec_jax.config.layers import LayerConfig, RecurrenceConfig, Rotary
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.longspec import DraftConfig
from tests.kit import each_row, tiny_target_config
from train.drafts.kinds import LongSpecSettings
from train.drafts.longspec import LongSpecObjective
from train.loop import peak_tokens_per_second
from train.target import TargetObjective, target_flops

SETTINGS = LongSpecSettings("longspec", "", 512, True, 4, 4)


def draft_of(target: TargetConfig, window: int = 512) -> LongSpecObjective:
    draft = DraftConfig.for_target(target, window=window)
    return LongSpecObjective(target, draft, SETTINGS, 0, 8192)


@each_row(
    ("name", "length", "gigaflops"),
    [
        ("vicuna7b", 1024, 15.1),
        ("vicuna7b", 16384, 19.6),
        ("llama3-8b", 1024, 17.9),
        ("llama3-8b", 32768, 27.1),
        ("qwq32b-preview", 32768, 91.4),
    ],
)
def test_models_of_the_paper_need_what_was_counted_elsewhere(
    name: str, length: int, gigaflops: float
) -> None:
    """There with all of the target's last layer, of which the draft reads keys and values."""
    config = TARGETS[name].config
    d, q = config.model_width, config.num_heads * config.head_width
    unread = 2 * (2 * d * q + 3 * d * config.mlp_width) + 4 * q * (length + 1) / 2
    needed = draft_of(config).flops_per_token(length) + unread
    assert needed / 1e9 == pytest.approx(gigaflops, rel=0.01)


def test_every_product_of_a_tiny_draft_is_counted() -> None:
    target = tiny_target_config(
        vocab_size=11, model_width=6, mlp_width=5, num_layers=2, num_heads=3, num_kv_heads=1,
        head_width=2,
    )  # fmt: skip
    # Queries and output 6x6, keys and values 6x2 each, MLP three of 6x5; a row sees 2 keys of 3.
    layer = 2 * (2 * 36 + 2 * 12 + 90) + 4 * 6 * 2
    head = 2 * 6 * 11
    # Its cross-attention has 6x6 for queries and output; its window of 1 shows 5 keys in 3 rows.
    draft = 2 * (4 * 36 + 2 * 12 + 90) + 4 * 6 * (5 / 3 + 2)
    plain, keys_values = draft_of(target, window=1), 2 * 2 * 12
    read = layer + keys_values
    assert plain.flops_per_token(3) == pytest.approx(read + 3 * draft + 2 * head)
    distilled = replace(plain, settings=replace(SETTINGS, distillation=0.5))
    assert distilled.flops_per_token(3) == pytest.approx(2 * layer + 3 * draft + 3 * head)
    trained = TargetObjective(target, 16)
    assert trained.flops_per_token(3) == 3 * (2 * layer + head)


def test_every_product_of_a_recurrent_layer_is_counted() -> None:
    target = tiny_target_config(
        vocab_size=11, model_width=6, mlp_width=5, num_layers=2, num_heads=3, num_kv_heads=1,
        head_width=2, gated_attention=True, pattern=(0, 1),
        kinds=(LayerConfig(recurrence=RecurrenceConfig(1, 2, 4, 5)), LayerConfig(Rotary())),
    )  # fmt: skip
    # From 6 to a query and a key of 4, two values and gates of 5 and two rates each, and back;
    # the state of 4x10 is read for the key, written, and read for the query.
    recurrent = 2 * (6 * (8 + 10 + 10 + 4) + 10 * 6 + 3 * 40) + 2 * 90
    # Queries, gates and output 6x6, keys and values 6x2 each; a row sees 2 keys of 3.
    attention = 2 * (3 * 36 + 2 * 12 + 90) + 4 * 6 * 2
    assert target_flops(target, 3) == recurrent + attention


@each_row(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 990e12),
        ("NVIDIA H200", 990e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA L4", None),
        ("cpu", None),
    ],
)
def test_use_is_told_where_the_peak_is_known(kind: str, peak: float | None) -> None:
    flops = draft_of(tiny_target_config()).flops_per_token(64)
    devices = 4 * [SimpleNamespace(device_kind=kind)]
    expected = peak and pytest.approx(4 * peak / flops)
    assert peak_tokens_per_second(flops, "bfloat16", devices) == expected
    assert peak_tokens_per_second(flops, "float32", devices) is None
