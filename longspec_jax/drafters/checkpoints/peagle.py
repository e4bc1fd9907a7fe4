"""P-EAGLE drafts as their trainers publish them.

They are EAGLE-3's files (:mod:`longspec_jax.drafters.checkpoints.eagle3`) with more layers, a mask
token, and ``mask_hidden``, what mask slots have in place of the target's hidden states. speculators
counts the target's layers by what enters them, the others by what leaves them. The first layer of
these is ``midlayer`` or ``layers.0``.
"""

from collections.abc import Iterable

from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints import eagle3
from longspec_jax.drafters.checkpoints.eagle3 import (
    FIRST_LAYER,
    MIDLAYER,
    SPECULATORS,
    draft_fields,
    layers_of,
    made_for,
)
from longspec_jax.drafters.checkpoints.features import (
    Described,
    FeatureDialect,
    FeatureFiles,
    without_prefix,
)
from longspec_jax.drafters.peagle import PEagleConfig, PEagleDraft, PEagleOptions, PEagleParams
from longspec_jax.drafters.registry import MASK_TOKENS
from longspec_jax.drafters.tables import NOT_WHOLE
from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.hf_config import LAYER
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.tables import Rule, Table, bind, layer_rules, layer_sizes

VLLM = FeatureDialect("vLLM", False, "a mask token", MIDLAYER)
"""Also of amazon, NeMo and SpecForge."""
MASK_HIDDEN = "mask_hidden"


def dialect_of(raw: JsonObject) -> FeatureDialect:
    """The dialect of a draft, by its ``config.json``."""
    if not raw.has("speculators_model_type"):
        return VLLM
    if raw.text("speculators_model_type", "") != "peagle":
        rule = "is not supported with a mask token, only 'peagle'"
        raise raw.error("speculators_model_type", rule, "load another draft")
    return SPECULATORS


def draft_config(
    raw: JsonObject,
    dialect: FeatureDialect,
    tensors: Iterable[str],
    target: TargetConfig,
    options: PEagleOptions,
) -> PEagleConfig:
    """The draft that a ``config.json`` describes; arguments and errors as of EAGLE-3's."""
    part = layers_of(raw, dialect)
    layers = {"0"} | {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if part.whole("num_hidden_layers") != len(layers):
        raise part.error("num_hidden_layers", f"must be {len(layers)}, the layers of the weights")
    if len({*part.texts("layer_types")}) > 1:
        rule = "is not supported: all layers have the window or none has"
        raise part.error("layer_types", rule, "load another draft")
    found = draft_fields(raw, part, dialect, tensors, target, options) | dict(
        normed_head=True,
        normed_feedback=False,
        num_layers=len(layers),
        mask_token=_mask_token(raw),
        depths=_depths(raw),
    )
    return part.build(PEagleConfig, found, LAYER)


def _mask_token(raw: JsonObject) -> int:
    """The mask token, in the order in which vLLM looks for it."""
    own = raw.part("dflash_config")
    if own.has(MASK_TOKENS[0]):
        return own.whole(MASK_TOKENS[0], least=0)
    for key in MASK_TOKENS:
        if raw.has(key):
            return raw.whole(key, least=0)
    raise ValueError(
        f"{raw.origin}: the file names no mask token ({', '.join(MASK_TOKENS)}), whose embedding "
        "stands in mask slots; use the config.json that was saved with the weights"
    )


def _depths(raw: JsonObject) -> int | None:
    """Tokens of a block in training, which speculators names as those to propose."""
    key, methods = "num_depths", raw.part("speculators_config").values.get("proposal_methods")
    if isinstance(methods, list) and methods and isinstance(methods[0], dict):
        key, raw = "speculative_tokens", JsonObject(methods[0], raw.origin)
    return raw.whole(key) if raw.has(key) else None


def draft_table(
    config: PEagleConfig,
    *,
    embedding: bool,
    head: bool,
    layer: str = MIDLAYER,
    mask: str = "O P C",
) -> Table:
    """The tensors of a draft: EAGLE-3's, the later layers, and the feature of mask slots.

    Args:
      mask: axes of the latter as it is stored; other arguments as of EAGLE-3's.
    """
    first = eagle3.draft_table(config, embedding=embedding, head=head, layer=layer)
    sizes = layer_sizes(config) | {"C": len(config.features) * config.target_width, "P": 1}
    leaves = [*first.leaves, bind(Rule(MASK_HIDDEN, "O P C", ((MASK_HIDDEN, mask),)), sizes)]
    for index in range(1, config.num_layers):
        ours, theirs = f"layers_{index - 1}/", f"layers.{index}."
        leaves += [bind(rule, sizes, ours, theirs) for rule in layer_rules(config.plain_layer)]
    return Table(tuple(leaves), first.dropped)


def _described(
    raw: JsonObject, tensors: Tensors, target: TargetConfig, options: PEagleOptions
) -> Described[PEagleConfig]:
    tensors, dialect = without_prefix(tensors), dialect_of(raw)
    if MASK_HIDDEN not in tensors:
        raise ValueError(
            f"{raw.origin}: the weights next to it have no {MASK_HIDDEN}, which stands in mask "
            f"slots for the target's hidden states; {NOT_WHOLE}"
        )
    if dialect is VLLM and not any(name.startswith(MIDLAYER) for name in tensors):
        tensors = {_with_midlayer(name): tensor for name, tensor in tensors.items()}
    config = draft_config(raw, dialect, tensors, target, options)
    table = draft_table(
        config,
        embedding="embed_tokens.weight" in tensors,
        head="lm_head.weight" in tensors,
        layer=dialect.layer,
        mask="(O P) C" if len(tensors[MASK_HIDDEN].shape) == 2 else "O P C",
    )
    return Described(config, table, tensors, raw.flag("tie_word_embeddings", False))


def _with_midlayer(name: str) -> str:
    first = name.startswith(FIRST_LAYER)
    return MIDLAYER + name.removeprefix(FIRST_LAYER) if first else name


FILES = FeatureFiles(_described, PEagleParams.bound, PEagleDraft.bind, PEagleOptions, made_for)
load, load_draft = FILES.load, FILES.load_draft
