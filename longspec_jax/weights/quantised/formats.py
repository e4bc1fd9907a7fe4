"""What ``config.json`` says of quantisation: which linears are stored in which format.

The keys are read strictly. A format that is not computed exactly is refused by name, and so is a
key that changes the arithmetic, such as a rotation. What quantises activations is dropped: the
target is the model of the dequantised weights, multiplied in 16 or 32 bits.

Sources: compressed-tensors 0.20 (``quantization/quant_args.py``, ``quant_scheme.py``), transformers
5 (``quantizers/``), GPTQModel (``quantization/config.py``) and AutoAWQ (``models/_config.py``).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longspec_jax.checks import shown
from longspec_jax.weights.json_files import QUANTISATION, JsonObject, checked_pattern
from longspec_jax.weights.quantised.stored import Awq, Bytes, Format, Gptq, Packed

SUPPORTED = (
    "supported are compressed-tensors (float-quantized in 8 bits, int-quantized in 8 bits, "
    "pack-quantized in 4 and 8 bits), fp8, gptq in 4 and 8 bits, awq in the gemm layout, and mxfp4 "
    "of gpt-oss"
)
REMEDY = f"{SUPPORTED}; choose another checkpoint of the model, or load the unquantised checkpoint"
BLOCK = re.compile(r"(\d+)x(\d+)")

Matches = Callable[[str], bool]
"""Whether a linear, by its full name, is meant."""


@dataclass(frozen=True)
class Quantisation:
    """How the linears of a checkpoint are stored.

    Attributes:
      origin: the file and the key that describe it.
      groups: formats and the linears they are for; the first that matches counts.
      whole: which linears are not quantised.
      experts: whether stacked experts are of MXFP4.
    """

    origin: str
    groups: tuple[tuple[Matches, Format], ...]
    whole: Matches
    experts: bool = False

    def format_of(self, name: str) -> Format | None:
        """The format of a linear; None if it is not quantised."""
        # A model that also sees names its target's linears with a prefix of its own.
        inner = name.removeprefix("model.")
        names = name, f"language_model.{name}", f"model.language_model.{inner}"
        if any(map(self.whole, names)):
            return None
        return next((form for matches, form in self.groups if any(map(matches, names))), None)


def quantisation(raw: JsonObject) -> Quantisation | None:
    """How the checkpoint next to a ``config.json`` is quantised; None if it is not.

    Raises:
      ValueError: for a format that is not supported, by name.
    """
    key = next((key for key in QUANTISATION if raw.has(key)), None)
    if key is None:
        return None
    part = raw.part(key)
    method = part.text("quant_method", "compressed-tensors" if key == QUANTISATION[1] else "")
    if method not in METHODS:
        named = "checkpoints of bitsandbytes are made of unquantised ones, which load faster"
        advice = f"{named}; {REMEDY}" if method == "bitsandbytes" else REMEDY
        raise part.error("quant_method", "is not read", advice)
    return METHODS[method](part)


def _compressed_tensors(part: JsonObject) -> Quantisation:
    _refuse(part, "quantization_status", "compressed", "weights stored whole next to their scales")
    for key, what in (
        ("transform_config", "rotated weights"),
        ("sparsity_config", "sparse weights"),
    ):
        inner = part.part(key)
        if any(inner.has(name) for name in inner.values) and inner.text("format", "") != "dense":
            raise part.error(key, f"is not supported: {what} are not read", REMEDY)
    named = part.part("config_groups")
    groups: list[tuple[int, Matches, Format]] = []
    for name in named.values:
        group = named.part(name)
        form = group.text("format", part.text("format", ""))
        targets = group.texts("targets")
        format = _of_scheme(group, form)
        # As compressed-tensors does, exact names and patterns come before classes of modules.
        exact = [each for each in targets if each != "Linear"]
        groups.append((0, _named(exact, part), format))
        if len(exact) < len(targets):
            groups.append((1, lambda name: True, format))
    if not groups:
        raise part.error("config_groups", "must name the quantised linears")
    ordered = sorted(groups, key=lambda group: group[0])
    return Quantisation(
        part.origin, tuple(each[1:] for each in ordered), _named(part.texts("ignore"), part)
    )


def _of_scheme(group: JsonObject, form: str) -> Format:
    """The format of a group of compressed-tensors."""
    weights = group.part("weights")
    bits, kind = weights.whole("num_bits", 8), weights.text("type", "int")
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "channel")
    symmetric = weights.flag("symmetric", True)
    scheme = f"{form or 'no format'} of {kind} in {bits} bits by {strategy}"
    if weights.values.get("dynamic") not in (None, False):
        raise weights.error("dynamic", "is not read: scales of weights are stored", REMEDY)
    match form, kind, bits, strategy:
        case "float-quantized" | "naive-quantized", "float", 8, "tensor" | "channel":
            return Bytes(floating=True)
        case "float-quantized" | "naive-quantized", "float", 8, "block":
            return Bytes(floating=True, block=_block(weights, "block_structure"))
        case "int-quantized" | "naive-quantized", "int", 8, "tensor" | "channel":
            return Bytes(floating=False, symmetric=symmetric)
        case "int-quantized" | "naive-quantized", "int", 8, "group":
            return Bytes(floating=False, block=(1, weights.whole("group_size")))
        case "pack-quantized", "int", 4 | 8, "channel" | "group":
            size = 0 if strategy == "channel" else weights.whole("group_size")
            return Packed(bits, size, symmetric, _act_order(weights))
    raise ValueError(f"{group.origin}: {scheme} is not read; {REMEDY}")


def _act_order(weights: JsonObject) -> bool:
    """Whether a tensor names the groups of the inputs."""
    named = weights.values.get("actorder")
    if named not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise weights.error("actorder", "is not read", REMEDY)
    return named in (True, "group", "dynamic")


def _block(part: JsonObject, key: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    found = part.values.get(key)
    if isinstance(found, str) and (match := BLOCK.fullmatch(found)):
        found = [int(size) for size in match.groups()]
    if not (
        isinstance(found, list)
        and len(found) == 2
        and all(type(size) is int and size > 0 for size in found)
    ):
        raise part.error(key, "must be two sizes, outputs and inputs")
    return found[0], found[1]


def _fp8(part: JsonObject) -> Quantisation:
    _refuse(part, "fmt", "e4m3", "8-bit floats of another kind")
    block = _block(part, "weight_block_size") if part.has("weight_block_size") else None
    format = Bytes(floating=True, scale="weight_scale_inv", block=block)
    return _all_of(part, format)


def _gptq(part: JsonObject) -> Quantisation:
    stored = part.text("checkpoint_format", "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise part.error("checkpoint_format", "is not read", REMEDY)
    _refuse(part, "pack_dtype", "int32", "words of another size")
    for key in ("lm_head", "is_marlin_format"):
        if part.flag(key, False):
            raise part.error(key, "is not supported", REMEDY)
    offset = 0 if stored == "gptq_v2" else 1

    def format(values: dict[str, Any], origin: str) -> Gptq:
        own = JsonObject(values, origin)
        bits = own.whole("bits")
        if bits not in (4, 8):
            raise own.error("bits", "is not read", REMEDY)
        return Gptq(bits, _group_size(own), own.flag("sym", True), offset)

    groups: list[tuple[Matches, Format]] = []
    whole = []
    dynamic = part.part("dynamic")
    for pattern in dynamic.values:
        sign, bare = pattern[:2], re.sub(r"^[+-]:", "", pattern)
        matches = _pattern(bare, dynamic)
        if sign == "-:":
            whole.append(matches)
            continue
        more = dynamic.part(pattern)
        groups.append((matches, format({**part.values, **more.values}, more.origin)))
    groups.append((lambda name: True, format(dict(part.values), part.origin)))
    return Quantisation(part.origin, tuple(groups), lambda name: any(each(name) for each in whole))


def _awq(part: JsonObject) -> Quantisation:
    version = part.text("version", "gemm").lower()
    if version != "gemm":
        raise part.error("version", "is not read, its layout is made for one kernel", REMEDY)
    if part.whole("bits", part.whole("w_bit", 4)) != 4:
        raise part.error("bits", "is not read", REMEDY)
    size = _group_size(part, "q_group_size" if part.has("q_group_size") else "group_size")
    format = Awq(size, part.flag("zero_point", True))
    return _all_of(part, format)


def _mxfp4(part: JsonObject) -> Quantisation:
    """The MXFP4 format of gpt-oss, which quantises only the experts.

    The stored tensors show which modules are not.
    """
    return Quantisation(part.origin, (), lambda name: True, experts=True)


METHODS: Mapping[str, Callable[[JsonObject], Quantisation]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
"""What reads each ``quant_method``."""


def _all_of(part: JsonObject, format: Format) -> Quantisation:
    """Every linear, but those that are stored whole.

    ``modules_to_not_convert`` is not read: tools match its entries in several ways, as parts of a
    name, as modules or as patterns, and some leave it out. The stored tensors tell.
    """
    return Quantisation(part.origin, ((lambda name: True, format),), lambda name: False)


def _group_size(part: JsonObject, key: str = "group_size") -> int:
    """Inputs that share a scale; 0 for all, which files write as -1."""
    size = part.whole(key, 128, least=-1)
    if size == 0:
        raise part.error(key, "must be at least 1, or -1 for one group")
    return max(size, 0)


def _refuse(part: JsonObject, key: str, only: str, what: str) -> None:
    """Refuse any other value of a key."""
    if part.text(key, only) != only:
        raise part.error(key, f"is not supported, only {only!r}: {what} are not read", REMEDY)


def _named(entries: Sequence[str], part: JsonObject) -> Matches:
    """Linears by exact name, class, or ``re:`` pattern, as compressed-tensors names them."""
    patterns = [_pattern(each[3:], part) for each in entries if each.startswith("re:")]
    names = set(entries)
    return lambda name: (
        name in names or "Linear" in names or any(matches(name) for matches in patterns)
    )


def _pattern(text: str, part: JsonObject) -> Matches:
    """Linears by a regular expression from the start of their names."""
    try:
        compiled = re.compile(checked_pattern(text))
    except re.error as error:
        raise ValueError(f"{part.origin}: {shown(text)} is not a pattern ({error})") from error
    return lambda name: compiled.match(name) is not None
