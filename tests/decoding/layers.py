"""Targets whose layers are not all alike, and what is decoded with them: three unlike rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.config.layers import (
    ExpertsConfig,
    HeadsConfig,
    LayerConfig,
    ProportionalRopeScaling,
    RecurrenceConfig,
    Rotary,
    YarnRopeScaling,
)
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.ops.recurrence import recurrence
from longspec_jax.ops.recurrence.operands import RecurrentTokens, empty_state
from tests.decoding.lossless import generate, prompts, request
from tests.kit import draft_params, random_draft, random_target, tiny_target_config
from tests.ops.recurrence.reference import delta_rule_reference

LENGTHS = np.array([61, 30, 1], np.int32)
"""Of the prompts: beyond a ring of slots, beyond a window, and one token."""
W = 7
"""The window."""


@dataclass(frozen=True, eq=False)
class Family:
    """A target, its LongSpec draft, and the text of plain decoding."""

    config: TargetConfig
    new: tuple[int, ...]
    """New tokens of every row."""
    tree: TreeConfig
    """Of the LongSpec draft."""
    changed: Callable[[TargetConfig, Any], Any] = lambda config, params: params
    """Random parameters, so changed that what is special shows."""
    seed: int = 0
    recur: Any = None
    """The definition of recurrent layers."""

    def __str__(self) -> str:
        return self.config.architecture

    @property
    def target(self) -> TargetModel:
        return TargetModel(self.config)

    @property
    def draft(self) -> DraftConfig:
        return DraftConfig.for_target(self.config, window=11)

    @property
    def longspec(self) -> LongSpecDrafter:
        return LongSpecDrafter(self.draft, self.tree)

    @cached_property
    def prompts(self) -> np.ndarray:
        return prompts(self.config.vocab_size, LENGTHS)

    @cached_property
    def given(self) -> tuple[np.ndarray, np.ndarray, Request]:
        """What is decoded: a greedy row, and two that are sampled."""
        mixed = request((0.0, 0.7, 1.0), new=np.asarray(self.new, np.int32))
        return self.prompts, LENGTHS, mixed

    @cached_property
    def models(self) -> Params:
        """A random target, and a draft of which part is the target's own taste."""
        target = self.changed(self.config, random_target(self.config, self.seed))
        return Params(target, draft_params(random_draft(self.draft), target))

    @cached_property
    def plain(self) -> list[np.ndarray]:
        """The text of plain decoding."""
        return generate(self.target, NoDraft(), self.models, *self.given)[0]


WINDOWS = Family(
    tiny_target_config(
        architecture="Gemma3ForCausalLM",
        num_layers=4,
        rope_theta=1e6,
        qk_norm=True,
        post_norms=True,
        offset_norms=True,
        gelu=True,
        embedding_factor=6.0,
        attention_scale=0.3,
        attention_cap=3.0,
        logit_cap=8.0,
        kinds=(LayerConfig(Rotary(1e4), window=W), LayerConfig(Rotary(1e6))),
        pattern=(0, 1, 1, 0),
    ),
    new=(50, 40, 30),
    tree=TreeConfig((2,) + (1,) * 8),
)
"""As of Gemma 3, with Gemma 2's caps: the last layer has a window, drafts read the one before.

The draft's trees are deeper than the window.
"""


FAR = Rotary(1e6, ProportionalRopeScaling(), 4)
BESIDE = ExpertsConfig(count=8, chosen=2, width=10, parallel_mlp=True)
GEMMA4 = Family(
    tiny_target_config(
        architecture="Gemma4ForCausalLM",
        vocab_size=102,
        mlp_width=54,
        num_layers=6,
        num_kv_heads=2,
        head_width=8,
        rope_theta=1e6,
        rope_scaling=ProportionalRopeScaling(),
        rotary_width=4,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_factors=True,
        layer_inputs=5,
        gelu=True,
        embedding_factor=6.0,
        attention_scale=1.0,
        logit_cap=8.0,
        kinds=(
            LayerConfig(Rotary(1e4), W, BESIDE, heads=HeadsConfig(6, 6)),
            LayerConfig(FAR, experts=BESIDE, keys_are_values=True),
            LayerConfig(Rotary(1e4), W, BESIDE, heads=HeadsConfig(6, 6), keys_of=2, mlp_width=108),
            LayerConfig(FAR, experts=BESIDE, keys_of=3, mlp_width=108),
        ),
        pattern=(0, 1, 0, 1, 2, 3),
    ),
    new=(50, 40, 30),
    tree=TreeConfig((2,) + (1,) * 8),
)
"""All that Gemma 4 has in any size.

Heads of two widths, in full layers values that are keys, experts next to MLPs, what every token
gives to each layer, and two last layers that read the keys of the two before them.
"""


def remembering(config: TargetConfig, params: Any) -> Any:
    """States fade by a tenth a token, not by half."""
    for index in config.recurrent_layers:
        bias = params[f"layers_{index}"]["recurrence"]["decay_bias"]
        params[f"layers_{index}"]["recurrence"]["decay_bias"] = bias - 2.0
    return params


SIZES = RecurrenceConfig(key_heads=2, value_heads=4, key_width=6, value_width=10, taps=4)


def recur(layer: int, tokens: RecurrentTokens, taps: jax.Array) -> jax.Array:
    """The recurrence's definition, token by token."""
    length, state = tokens.inputs.shape[1], empty_state(SIZES, 1, "float32")
    inputs = tokens.inputs[..., : SIZES.inputs_width]  # Gates are after them.
    padded = jnp.pad(inputs, ((0, 0), (3, 0), (0, 0), (0, 0)))
    mixed = sum(padded[:, tap : tap + length] * taps[:, :, tap] for tap in range(4))
    operands = recurrence._operands(
        state.memory, jax.nn.silu(mixed), tokens.log_decay, tokens.strength
    )
    return delta_rule_reference(state.memory, operands)[1]


RECURRENT = Family(
    tiny_target_config(
        architecture="Qwen3_5ForCausalLM",
        num_layers=4,
        head_width=8,
        rotary_width=4,
        mlp_width=54,
        vocab_size=102,
        qk_norm=True,
        offset_norms=True,
        gated_attention=True,
        kinds=(LayerConfig(recurrence=SIZES), LayerConfig(Rotary(width=4))),
        pattern=(0, 1, 0, 0),
    ),
    new=(40, 30, 20),
    tree=TreeConfig((3, 2, 1, 1, 1), budget=7),
    changed=remembering,
    recur=recur,
)
"""As of Qwen3.5, but that its last layers are recurrent: drafts read the second one."""


def with_sinks(config: TargetConfig, params: Any) -> Any:
    """One sink takes nearly all of a softmax, another nearly nothing."""
    for layer in range(config.num_layers):
        attention = params[f"layers_{layer}"]["attention"]
        attention["sinks"] = attention["sinks"].at[0, :2].set(jnp.array([4.0, -20.0]))
    return params


ROTARY = Rotary(1e4, replace(YarnRopeScaling.usual(4.0, 16), truncate=False))
MIXTURE = ExpertsConfig(count=8, chosen=2, width=20, biases=True, limit=0.5)
GPT_OSS = Family(
    tiny_target_config(
        architecture="GptOssForCausalLM",
        vocab_size=102,
        mlp_width=20,
        rope_scaling=ROTARY.scaling,
        qkv_bias=True,
        out_bias=True,
        attention_sinks=True,
        kinds=(LayerConfig(ROTARY, W, MIXTURE), LayerConfig(ROTARY, None, MIXTURE)),
        pattern=(0, 1),
    ),
    new=(31, 23, 17),
    tree=TreeConfig((2,) + (1,) * 8),
    changed=with_sinks,
    seed=1,
)
"""Windows, sinks, biases and experts together. The draft's trees are deeper than the window."""
