"""LoRA adapters in PEFT's format, merged into a target's weights as they are read.

Every linear that an adapter names has W + s B A (Hu et al., 2021) instead of W: summed in float32
and rounded once, slice by slice, so that no copy of the weights is made. s is ``lora_alpha / r``,
or ``lora_alpha / sqrt(r)`` with ``use_rslora``, of the first pattern that a module's name matches.

An adapter changes what the target says, so nothing of it is passed over: every tensor is used once,
or the first that is not is named, with the nearest of the target's. What is known of PEFT's format
and cannot be merged is refused by its name, and so is any option that is not known and set.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from longspec_jax.checks import nearest, shown
from longspec_jax.weights.checkpoint import LM_HEAD, Index, Tensor, Tensors, open_tensors
from longspec_jax.weights.json_files import JsonObject, checked_pattern, read_json

CONFIG = "adapter_config.json"
FILES = "adapter_model.safetensors", "adapter_model.bin"
EMBEDDING = "model.embed_tokens.weight"
PREFIX = "base_model.model."
"""Of every stored name."""
MERGE = "merge it with PEFT (merge_and_unload), and load the merged model"
PLAIN_STARTS = "gaussian", "eva", "orthogonal"
"""Values of ``init_lora_weights`` besides true and false that leave the base as it is."""
REFUSED: dict[str, tuple[object, str]] = {
    "use_dora": (False, "DoRA scales whole columns of the sum"),
    "lora_bias": (False, "biases of the adapter need biases of the target"),
    "bias": ("none", "biases that were trained too are not read"),
    "fan_in_fan_out": (False, "no supported target stores its matrices so"),
    "layer_replication": (None, "it changes the target's layers"),
    "alora_invocation_tokens": (None, "an adapter that some tokens switch on cannot be merged"),
    "trainable_token_indices": (None, "rows of the embeddings that were trained are not read"),
    "ensure_weight_tying": (False, "adapters of tied tables are not read"),
}
"""Options with the one value that is merged, and why no other is."""
IGNORED = frozenset(
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode "
    "lora_dropout r lora_alpha use_rslora rank_pattern alpha_pattern target_modules "
    "exclude_modules layers_to_transform layers_pattern target_parameters modules_to_save "
    "init_lora_weights loftq_config eva_config corda_config lora_ga_config velora_config "
    "runtime_config megatron_core qalora_group_size".split()
)
"""Options that are read here, or say nothing about the weights."""
_LOW_RANK = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
_KNOWN_PARTS = {
    "lora_magnitude_vector": "is of DoRA",
    "trainable_tokens_delta": "holds rows of the embeddings that were trained",
    "lora_B.bias": "is a bias of the adapter",
}
"""What is in names of tensors that are not merged, and what it says."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Of experts that are adapted all at once, from the inner wrapper to the outer one."""


class LowRank(NamedTuple):
    """A sum of rank r: ``scale * b @ a``; of experts one after the other."""

    a: np.ndarray
    """``[..., r, in]`` float32."""
    b: np.ndarray
    """``[..., out, r]`` float32."""
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the sum."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    def read(self, index: Index) -> np.ndarray:
        """A part of the sum, in float32."""
        *experts, rows, columns = index
        a, b = self.a[(*experts, slice(None), columns)], self.b[(*experts, rows, slice(None))]
        return (b @ a) * np.float32(self.scale)

    @property
    def transposed(self) -> "LowRank":
        """The sum with its last two axes exchanged."""
        return LowRank(self.b.swapaxes(-1, -2), self.a.swapaxes(-1, -2), self.scale)

    def rows(self, first: int, last: int) -> "LowRank":
        """Some rows of the sum."""
        return self._replace(b=self.b[..., first:last, :])

    def expert(self, index: int) -> "LowRank":
        """The sum of one expert."""
        return LowRank(self.a[index], self.b[index], self.scale)


@dataclass
class _Adapter:
    """What an adapter's files say, and what has become of it."""

    config: JsonObject
    stored: dict[str, Tensor]
    """By names as the target has them."""
    wrapped: bool
    """Whether the file's names are those of a model around the target."""
    used: set[str] = field(default_factory=set)

    def take(self, name: str) -> np.ndarray:
        """A whole matrix, in float32."""
        tensor = self.stored[name]
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ValueError(
                f"{tensor.file}: {name} has the shape {tensor.shape}, must have two axes; it was "
                "saved from shards that were not gathered (DeepSpeed ZeRO-3): save it again"
            )
        self.used.add(name)
        values = tensor.read((slice(None), slice(None))).astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"{tensor.file}: {name} holds values that are not finite")
        return values

    def scale(self, module: str, rank: int) -> float:
        """What a module's product is multiplied by."""
        alpha = self._number("alpha_pattern", "lora_alpha", module)
        return alpha / (math.sqrt(rank) if self.config.flag("use_rslora", False) else rank)

    def _number(self, patterns: str, usual: str, module: str) -> float:
        """A number for a module, which patterns name as the file does, or as the target."""
        names = [module]
        if self.wrapped:
            names += [f"language_model.{module}"]
            names += [f"model.language_model.{module.removeprefix('model.')}"]
        return _of_pattern(self.config, patterns, usual, names)

    def check_rank(self, module: str, rank: int) -> None:
        """Refuse a rank that the file does not say: its scale would be another one."""
        said = self._number("rank_pattern", "r", module)
        if said != rank:
            raise ValueError(
                f"{self.config.origin}: {module} has the rank {rank} and the file says {said:g}; "
                "use the file that was saved with the weights"
            )


def with_adapter(tensors: Tensors, folder: Path, stack: ExitStack, *, tied: bool) -> Tensors:
    """A target's tensors with an adapter merged into them.

    Args:
      tensors: of the target, under its own names.
      folder: of the adapter.
      stack: closes its files.
      tied: whether the target's LM head is its embeddings.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: for what cannot be merged exactly, by its name.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: an adapter is a folder with {CONFIG} and {FILES[0]}")
    adapter = _read(folder, stack)
    found = dict(tensors)
    for name, low_rank in _low_ranks(adapter, tensors).items():
        found[name] = _plus(found[name], low_rank, name)
    for name in [*adapter.stored]:
        if name not in adapter.used and _is_saved(adapter, name, tensors):
            found[name] = _instead(tensors[name], adapter.stored[name], name)
            adapter.used.add(name)
    _check_all_used(adapter, tensors)
    changed = {name for name in tensors if found[name] is not tensors[name]}
    if tied and changed & {EMBEDDING, LM_HEAD}:
        raise ValueError(
            f"{folder}: the adapter changes {' and '.join(sorted(changed & {EMBEDDING, LM_HEAD}))} "
            "of a target whose LM head is its embeddings, and one would change the other; save the "
            f"target with two tables (tie_word_embeddings=false), or {MERGE}"
        )
    return found


def own_name(name: str) -> str:
    """A tensor's name in a text-only model, from its name in a model around that."""
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")


def _read(folder: Path, stack: ExitStack) -> _Adapter:
    """An adapter's configuration, checked, and its tensors."""
    config = read_json(folder / CONFIG)
    kind = config.text("peft_type", "")
    if kind != "LORA":
        raise config.error("peft_type", "is not supported, only LORA is", MERGE)
    for key, (value, reason) in REFUSED.items():
        if config.has(key) and config.values[key] != value:
            raise config.error(key, f"cannot be merged: {reason}", MERGE)
    start = config.values.get("init_lora_weights", True)
    if not isinstance(start, bool) and start is not None and start not in PLAIN_STARTS:
        rule = "has changed the target's own weights, so that the difference is to others"
        raise config.error("init_lora_weights", rule, "convert the adapter as PEFT's guide says")
    for key, value in config.values.items():
        if value and key not in IGNORED and key not in REFUSED:
            raise config.error(key, "is an option of PEFT that is not known here", MERGE)
    stored, wrapped = dict[str, Tensor](), False
    for name, tensor in open_tensors(folder, stack, FILES).items():
        if not name.startswith(PREFIX):
            raise ValueError(f"{tensor.file}: the name {name} does not begin with {PREFIX}")
        own = own_name(name.removeprefix(PREFIX))
        if own in stored:
            raise ValueError(f"{tensor.file}: two tensors are {own}; save one model's adapter")
        stored[own] = tensor
        wrapped |= own != name.removeprefix(PREFIX)
    if not stored:
        raise ValueError(f"{folder} holds an adapter without tensors")
    return _Adapter(config, stored, wrapped)


def _of_pattern(config: JsonObject, patterns: str, usual: str, names: Sequence[str]) -> float:
    """A number for a module: that of the first pattern that its name matches, else the usual."""
    for key in config.part(patterns).values:
        try:
            matches = any(re.match(rf"(.*\.)?({checked_pattern(key)})$", name) for name in names)
        except re.error as error:
            raise config.error(patterns, f"has the key {key!r}: {error}") from None
        if matches:
            return config.part(patterns).number(key, least=1e-6)
    return config.number(usual, 8, least=1e-6)


def _low_ranks(adapter: _Adapter, tensors: Tensors) -> dict[str, LowRank]:
    """What is added to tensors of the target, by their names."""
    pairs = dict[str, dict[str, str]]()
    for name in adapter.stored:
        for part, says in _KNOWN_PARTS.items():
            if part in name:
                raise ValueError(
                    f"{adapter.config.origin}: {name} {says}, which is refused; {MERGE}"
                )
        if matched := _LOW_RANK.fullmatch(name):
            pairs.setdefault(matched[1], {})[matched[2]] = name
    found = dict[str, LowRank]()
    for module, names in pairs.items():
        if len(names) < 2:
            [(kind, only)] = names.items()
            other = "B" if kind == "A" else "A"
            raise ValueError(f"{adapter.config.origin}: {only} is there without its lora_{other}")
        experts = re.fullmatch(r"(.+\.experts)(\.base_layer)?", module)
        if experts is not None:
            found |= _of_experts(adapter, tensors, experts[1], names, pairs)
            continue
        target = f"{module}.weight"
        if target not in tensors:
            continue  # Told of with what is left over.
        a, b = adapter.take(names["A"]), adapter.take(names["B"])
        adapter.check_rank(module, a.shape[0])
        low_rank = LowRank(a, b, adapter.scale(module, a.shape[0]))
        embeds = "lora_embedding_" in names["A"]
        found[target] = low_rank.transposed if embeds else low_rank
        _check_base(adapter, module, tensors[target])
    return found


def _check_base(adapter: _Adapter, module: str, target: Tensor) -> None:
    """Refuse a copy of the base's table that is another one: of another target, or with tokens."""
    name = f"{module}.base_layer.weight"
    if name not in adapter.stored:
        return
    base, every = adapter.stored[name], (slice(None), slice(None))
    if base.shape != target.shape or not np.array_equal(base.read(every), target.read(every)):
        raise ValueError(
            f"{base.file}: {name} is not the target's table ({base.shape} next to {target.shape}): "
            "tokens were added, or the adapter is of another target; " + MERGE
        )
    adapter.used.add(name)


def _of_experts(
    adapter: _Adapter,
    tensors: Tensors,
    module: str,
    names: Mapping[str, str],
    pairs: Mapping[str, Mapping[str, str]],
) -> dict[str, LowRank]:
    """The update of all experts of a layer: the expert is A's slowest axis, B's fastest."""
    if not any(name.startswith(f"{module}.") for name in tensors):
        return {}
    for patterns in ("rank_pattern", "alpha_pattern"):
        if adapter.config.part(patterns).values:
            raise adapter.config.error(patterns, "with adapters of all experts at once", MERGE)
    parameter = _parameter(adapter, module, names, pairs)
    a, b = adapter.take(names["A"]), adapter.take(names["B"])
    whole = tensors.get(f"{module}.{parameter}")
    if whole is not None:
        count = whole.shape[0]
    else:
        own = rf"{re.escape(module)}\.(\d+)\.gate_proj\.weight"
        count = sum(re.fullmatch(own, name) is not None for name in tensors)
    rank = a.shape[0] // max(count, 1)
    if not count or rank * count != a.shape[0] or b.shape[1] != a.shape[0]:
        raise ValueError(
            f"{adapter.config.origin}: {names['A']} has {a.shape[0]} rows and {names['B']} "
            f"{b.shape[1]} columns, must have as many, and a multiple of the {count} experts"
        )
    adapter.check_rank(module, rank)
    low_rank = LowRank(
        a.reshape(count, rank, -1),
        np.ascontiguousarray(b.reshape(b.shape[0], rank, count).transpose(2, 0, 1)),
        adapter.scale(module, rank),
    )
    if whole is not None:
        _, *sizes = whole.shape
        if sizes[0] == sizes[1]:
            raise ValueError(
                f"{adapter.config.origin}: {names['A']} is of matrices of {sizes[0]} rows and as "
                f"many columns, and PEFT's versions differ in which is which; {MERGE}"
            )
        same = low_rank.shape[1:] == (sizes[0], sizes[1])
        return {f"{module}.{parameter}": low_rank if same else low_rank.transposed}
    return _apart(adapter, tensors, module, parameter, low_rank)


def _parameter(
    adapter: _Adapter,
    module: str,
    names: Mapping[str, str],
    pairs: Mapping[str, Mapping[str, str]],
) -> str:
    """The parameter of experts that a pair adapts; a pair alone has the module's name."""
    inner = f"{module}.base_layer"
    if inner in pairs and module in pairs:
        return GATE_UP if names is pairs[inner] else DOWN
    named = [
        parameter
        for parameter in (GATE_UP, DOWN)
        if any(
            f".{module}.{parameter}".endswith(f".{one}")
            for one in adapter.config.texts("target_parameters")
        )
    ]
    if len(named) != 1:
        raise adapter.config.error(
            "target_parameters", f"must name one of {GATE_UP} and {DOWN} of {module}"
        )
    return named[0]


def _apart(
    adapter: _Adapter, tensors: Tensors, module: str, parameter: str, low_rank: LowRank
) -> dict[str, LowRank]:
    """The same for experts that the target's file has one by one: gate above up."""
    experts, rows, columns = low_rank.shape
    first = "gate_proj" if parameter == GATE_UP else DOWN
    shape = tensors[f"{module}.0.{first}.weight"].shape
    stacked = (2 * shape[0], shape[1]) if parameter == GATE_UP else shape
    if stacked[0] == stacked[1]:
        raise ValueError(
            f"{adapter.config.origin}: the experts of {module} have matrices of {stacked[0]} rows "
            f"and as many columns, and PEFT's versions differ in which is which; {MERGE}"
        )
    if (rows, columns) == stacked[::-1]:
        low_rank, rows = low_rank.transposed, columns
    parts = {DOWN: (0, rows)}
    if parameter == GATE_UP:
        parts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    return {
        f"{module}.{index}.{name}.weight": low_rank.expert(index).rows(*some)
        for index in range(experts)
        for name, some in parts.items()
    }


def _plus(tensor: Tensor, low_rank: LowRank, name: str) -> Tensor:
    """A tensor with a sum of low rank added, in float32, and rounded once."""
    if low_rank.a.shape[-2] != low_rank.b.shape[-1] or low_rank.shape != tensor.shape:
        raise ValueError(
            f"the adapter's matrices for {name} have the shapes {low_rank.b.shape} and "
            f"{low_rank.a.shape}, and the target's the shape {tensor.shape}; the adapter is of "
            "another target"
        )

    def read(index: Index) -> np.ndarray:
        every = (*index, *[slice(None)] * (len(tensor.shape) - len(index)))
        values = tensor.read(every)
        return (values.astype(np.float32) + low_rank.read(every)).astype(values.dtype)

    return tensor._replace(read=read)


def _instead(tensor: Tensor, saved: Tensor, name: str) -> Tensor:
    """A tensor that was trained whole, as the target stores it."""
    if saved.shape != tensor.shape:
        raise ValueError(
            f"{saved.file}: {name} has the shape {saved.shape}, and the target's {tensor.shape}; "
            "tokens were added, or the adapter is of another target"
        )
    return tensor._replace(
        read=lambda index: saved.read(index).astype(jnp.dtype(tensor.dtype)), file=saved.file
    )


def _is_saved(adapter: _Adapter, name: str, tensors: Tensors) -> bool:
    """Whether a tensor is one of the target's that was trained whole."""
    module, _, kind = name.rpartition(".")
    saved = adapter.config.texts("modules_to_save")
    return name in tensors and kind in ("weight", "bias") and any(map(module.endswith, saved))


def _check_all_used(adapter: _Adapter, tensors: Tensors) -> None:
    """Refuse an adapter if some of it would be left out."""
    left = sorted(adapter.stored.keys() - adapter.used)
    if not left:
        return
    first = left[0]
    matched = _LOW_RANK.fullmatch(first)
    meant = nearest(f"{matched[1]}.weight" if matched else first, tensors)
    hint = f"; the nearest of the target's is {meant}" if meant else ""
    raise ValueError(
        f"{adapter.stored[first].file}: {len(left)} of {len(adapter.stored)} tensors belong to "
        f"nothing of the target, the first is {shown(first)}{hint}; take the target that the "
        f"adapter was trained on, {shown(adapter.config.values.get('base_model_name_or_path'))}"
    )
