"""Targets and drafts of real shapes with random weights, and caches filled without a prefill.

Speed does not depend on the values, so a benchmark needs no checkpoint. Compiled programs draw
everything on the device, in the model's dtype.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from longspec_jax.checks import shown_bytes
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.batch_invariant import choose_kernels
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Committed, Drafter, Features, Needs, Params
from longspec_jax.drafters.checkpoints.dflash import LAYERS as DFLASH_LAYERS
from longspec_jax.drafters.checkpoints.dflash import draft_table as dflash_table
from longspec_jax.drafters.checkpoints.dflash import evenly
from longspec_jax.drafters.checkpoints.eagle3 import draft_table as eagle3_table
from longspec_jax.drafters.checkpoints.longspec import draft_table as longspec_table
from longspec_jax.drafters.checkpoints.mtp import QWEN
from longspec_jax.drafters.checkpoints.parallel import draft_table as parallel_table
from longspec_jax.drafters.checkpoints.peagle import draft_table as peagle_table
from longspec_jax.drafters.dflash import DFlashConfig, DFlashDraft, DFlashOptions, DFlashParams
from longspec_jax.drafters.draft import Draft
from longspec_jax.drafters.draft import Target as LoadedTarget
from longspec_jax.drafters.eagle import EagleOptions, MtpConfig, MtpDraft, MtpParams
from longspec_jax.drafters.eagle3 import Eagle3Config, Eagle3Draft, Eagle3Options, Eagle3Params
from longspec_jax.drafters.joined import JoinedDraft
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDraft, LongSpecOptions
from longspec_jax.drafters.ngram import NgramDraft
from longspec_jax.drafters.parallel import ParallelConfig, ParallelDraft, ParallelOptions
from longspec_jax.drafters.peagle import PEagleConfig, PEagleDraft, PEagleOptions, PEagleParams
from longspec_jax.drafters.registry import options_of, separated
from longspec_jax.drafters.retrieval.hierarchy import RetrievalDraft
from longspec_jax.drafters.small_lm import SmallLM, SmallLMOptions
from longspec_jax.generation.memory import free_bytes
from longspec_jax.loading import ChosenDraft, choose_drafts
from longspec_jax.models.target import Target, shares_head
from longspec_jax.ops.attention.float8 import CODES, codes, rounded
from longspec_jax.ops.matmul.packed_shares import packed_params
from longspec_jax.ops.matmul.quantised_weights import has_unpacked
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.ops.placement import tree_bytes
from longspec_jax.sharding import param_shardings, path_name
from longspec_jax.weights.tables import Table

from .arguments import DTYPES, KINDS
from .stored import quantised_leaf

WEIGHT_SCALE = 0.02
PLAIN_LAYERS: dict[str, Any] = dict(
    kinds=(), pattern=(), qkv_bias=False, out_bias=False, attention_sinks=False
)
"""What drafts have not, though their targets may."""
EAGLE3_VOCABULARY = 32000
"""Tokens that a published EAGLE-3 draft may propose."""
EAGLE3_POSITIONS = 2048
"""Positions that the authors train on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A target and its draft, as the engine takes them."""

    config: TargetConfig
    target: TargetModel
    params: Params
    draft: Draft

    def drafter(self, tree: TreeConfig) -> Any:
        """The draft growing this tree, with the target's choice of attention."""
        return self.draft.drafter(tree, self.target.attention)

    def proposing(self, tree: TreeConfig) -> "Model":
        """The same model with all that proposes to this tree: where it says so, lookup too."""
        if not tree.lookup or self.draft.looks_up:
            return self
        draft = JoinedDraft((self.draft, NgramDraft()))
        return dataclasses.replace(
            self, draft=draft, params=dataclasses.replace(self.params, draft=draft.params)
        )


def random_model(
    config: TargetConfig,
    attention: str | None = None,
    seed: int = 0,
    kind: str = "longspec",
    options: Mapping[str, Any] | None = None,
    batch_invariant: bool | None = None,
    weights: str = "whole",
    mesh: Mesh | None = None,
) -> Model:
    """Random weights of target and draft, drawn on the device.

    Args:
      config: of the target.
      attention: the implementation; chosen automatically if absent.
      seed: of all draws.
      kind: of the draft, or its folder.
      options: of the draft.
      batch_invariant: as in ``longspec_jax.decoding.batch_invariant.choose_kernels``.
      weights: how the target's are stored: whole, or one that ``--weights`` names.
      mesh: what all of them are spread over; one device if absent.
    """
    chosen = draft_options(kind, options or {}, config)
    target = random_target(config, seed, weights, mesh)
    match chosen:
        case ChosenDraft():
            draft: Draft = chosen.load(LoadedTarget(config, target), mesh)
        case LongSpecOptions():
            draft = _random_longspec(config, target, chosen, seed + 1, mesh)
        case EagleOptions():
            draft = _random_mtp(config, target, chosen, seed + 1, mesh)
        case Eagle3Options():  # P-EAGLE's, too.
            draft = _random_eagle3(config, target, chosen, seed + 1, mesh)
        case DFlashOptions():
            draft = _random_dflash(config, target, chosen, seed + 1, mesh)
        case ParallelOptions():
            parallel = ParallelConfig(DraftConfig.for_target(config), config.vocab_size)
            drawn = _drawn(parallel_table(parallel), config.dtype, seed + 1, mesh)
            # In 8 bits only where it is named: a row says what it measured.
            int8 = bool(chosen.int8)
            draft = ParallelDraft.bind(parallel, drawn, target, int8=int8, mesh=mesh)
        case SmallLMOptions():
            small = _small(config, chosen)
            drawn = random_target(small, seed + 1)
            if mesh is not None:  # Whole on every device, as a small LM is loaded.
                drawn = jax.device_put(drawn, NamedSharding(mesh, PartitionSpec()))
            draft = SmallLM(small, drawn, working=chosen.working_cache(config))
        case _:
            draft = chosen
    _, retrieval = separated(options or {}, kind)
    if retrieval is not None and kind in KINDS:  # A loaded draft has it already.
        draft = RetrievalDraft(draft, config, retrieval)
    quantised = has_unpacked(target)
    whole = TargetModel(config, attention, mesh=None if mesh is None else mesh.abstract_mesh)
    static = choose_kernels(whole, batch_invariant, quantised=quantised)
    return Model(config, static, Params(target, draft.params), draft)


def _small(target: TargetConfig, options: SmallLMOptions) -> TargetConfig:
    """A Llama of 68 M parameters without its tables, the size of JackFram/llama-68m."""
    return dataclasses.replace(
        target,
        dtype=options.dtype or target.dtype,
        max_positions=options.context or target.max_positions,
        architecture="LlamaForCausalLM",
        model_width=768,
        mlp_width=3072,
        num_layers=2,
        num_heads=12,
        num_kv_heads=12,
        head_width=64,
        **PLAIN_LAYERS,
        qk_norm=False,
        gated_attention=False,
    )


def _random_longspec(
    config: TargetConfig, target: Any, options: LongSpecOptions, seed: int, mesh: Mesh | None
) -> LongSpecDraft:
    draft = DraftConfig.for_target(config)
    layer = _drawn(longspec_table(draft), config.dtype, seed, mesh)
    size = options.vocabulary
    tokens = None if size is None else np.arange(size, dtype=np.int32)
    return LongSpecDraft.bind(
        draft,
        layer,
        target,
        vocabulary=tokens,
        own_tokens=tokens is not None and mesh is None and shares_head(target),
        int8=bool(options.int8),  # Only where it is named: a row says what it measured.
        working=options.working_cache(config),
        mesh=mesh,
    )


def _random_eagle3(
    config: TargetConfig, target: Any, options: Eagle3Options, seed: int, mesh: Mesh | None
) -> Eagle3Draft:
    """A layer as wide as the target's, with an LM head of its own, as drafts of 8B targets have.

    P-EAGLE's has four such layers, and blocks of eight tokens.
    """
    parallel, layers = isinstance(options, PEagleOptions), config.num_layers
    usual = (1, layers // 2 - 1, layers - 4)
    make = functools.partial(PEagleConfig, num_layers=4, depths=8) if parallel else Eagle3Config
    draft = make(
        model_width=config.model_width,
        target_width=config.model_width,
        mlp_width=config.mlp_width,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_width=config.head_width,
        vocab_size=config.vocab_size,
        proposable=min(EAGLE3_VOCABULARY, config.vocab_size),
        features=options.features or tuple(max(layer, -1) for layer in usual),
        max_positions=EAGLE3_POSITIONS,
        dtype=config.dtype,
    )
    if isinstance(draft, PEagleConfig):
        tables, kind = PEagleParams, PEagleDraft
        table = peagle_table(draft, embedding=False, head=True)
    else:
        tables, kind = Eagle3Params, Eagle3Draft
        table = eagle3_table(draft, embedding=False, head=True)
    layer = _drawn(table, draft.dtype, seed, mesh)
    head, tokens = layer.pop("head"), jnp.arange(draft.proposable, dtype=jnp.int32)
    params = tables(layer, target["embedding"], head, tokens, own_embedding=False)
    int8 = bool(options.int8)  # Only where it is named: a row says what it measured.
    return kind.bind(draft, params, config, options, int8=int8, mesh=mesh)


def _random_mtp(
    config: TargetConfig, target: Any, options: EagleOptions, seed: int, mesh: Mesh | None
) -> MtpDraft:
    """One more layer of the target."""
    draft = MtpConfig.of(config, config.layer(config.read_layer), config.num_layers)
    layer = _drawn(QWEN.table(draft), config.dtype, seed, mesh)
    params = MtpParams.bound(layer, draft, config, target)
    int8 = bool(options.int8)  # Only where it is named: a row says what it measured.
    return MtpDraft.bind(draft, params, config, options, int8=int8, mesh=mesh)


def _random_dflash(
    config: TargetConfig, target: Any, options: DFlashOptions, seed: int, mesh: Mesh | None
) -> DFlashDraft:
    """Five layers as wide as the target's, and blocks of 16, as drafts of 8B targets have."""
    trunk = dataclasses.replace(
        config,
        architecture=DFLASH_LAYERS,
        num_layers=5,
        **PLAIN_LAYERS,
        qk_norm=True,
        tied_embeddings=False,
    )
    draft = DFlashConfig(
        trunk,
        target_width=config.model_width,
        target_layers=config.num_layers,
        proposable=config.vocab_size,
        features=options.features or evenly(config.num_layers, trunk.num_layers),
        block=16,
        mask_token=config.vocab_size - 1,
    )
    table = dflash_table(draft, embedding=False, head=False)
    layer = _drawn(table, config.dtype, seed, mesh)
    params = DFlashParams.bound(layer, draft, config, target)
    int8 = bool(options.int8)  # Only where it is named: a row says what it measured.
    return DFlashDraft.bind(draft, params, config, options, int8=int8, mesh=mesh)


def _drawn(table: Table, dtype: str, seed: int, mesh: Mesh | None) -> Any:
    """Random parameters of a name table."""
    kind = jnp.dtype(dtype)

    def zeros(key: jax.Array) -> dict[str, jax.Array]:
        return {leaf.path: jnp.zeros(leaf.shape, kind) for leaf in table.leaves}

    return unflatten_dict(_draw(zeros, seed, mesh=mesh), sep="/")


def draft_options(kind: str, values: Mapping[str, Any], target: TargetConfig) -> Any:
    """The options of a kind of draft, checked; of a kind without weights that is the draft.

    Raises:
      ValueError: for an option it does not have, or a value that it cannot have.
    """
    if kind not in KINDS:
        return choose_drafts([kind], values)[0]
    own, _ = separated(values, kind)
    options = options_of(KINDS[kind], own, kind)
    if isinstance(options, LongSpecOptions) and options.vocabulary is not None:
        if not 1 <= options.vocabulary <= target.vocab_size:
            raise ValueError(
                f"draft_options: vocabulary={options.vocabulary} must be 1 to {target.vocab_size}, "
                "the tokens of the target; name fewer, or leave it out for all"
            )
    if isinstance(options, SmallLMOptions) and options.dtype not in (None, *DTYPES):
        raise ValueError(
            f"draft_options: dtype={options.dtype!r} must be one of {', '.join(DTYPES)}, or left "
            "out for the target's"
        )
    return options


def target_bytes(config: TargetConfig, weights: str = "whole") -> int:
    """Bytes of the target's weights, none of which is drawn."""
    tree = jax.eval_shape(_initializer(config), jax.random.key(0))

    def stored(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        drawn = functools.partial(quantised_leaf, path, leaf, stored=weights, scale=WEIGHT_SCALE)
        return (None if weights == "whole" else jax.eval_shape(drawn, jax.random.key(0))) or leaf

    return tree_bytes(jax.tree_util.tree_map_with_path(stored, tree))


def check_memory(what: str, needed: int) -> None:
    """Raise before anything is drawn if the device cannot hold it."""
    free = free_bytes()
    if free is not None and needed > free:
        raise MemoryError(
            f"{what} takes {shown_bytes(needed)} and {shown_bytes(free)} are free on the device; "
            "choose a shorter context, fewer rows or a smaller shape"
        )


def random_target(
    config: TargetConfig, seed: int = 0, weights: str = "whole", mesh: Mesh | None = None
) -> Any:
    """Random parameters of a target; arguments as in :func:`random_model`."""
    return _draw(_initializer(config), seed, weights, mesh)


def _initializer(config: TargetConfig) -> Callable[[jax.Array], Any]:
    tokens = jnp.zeros((1, 2), jnp.int32)
    return lambda key: Target(config).init(key, tokens, method="initialize")["params"]


def _draw(init: Any, seed: int, weights: str = "whole", mesh: Mesh | None = None) -> Any:
    """Random leaves in the shapes of an initialiser that is traced and never run.

    On a mesh a leaf is drawn on one device and then spread, so that no device holds all of them.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(init, jax.random.key(0)))
    leaves = []
    for number, (path, leaf) in enumerate(paths):
        name, key = path_name(path), _key(seed, number)
        drawn = None
        if weights != "whole":
            drawn = quantised_leaf(path, leaf, key, weights, WEIGHT_SCALE)
        if drawn is None and name.endswith("scale"):
            drawn = jnp.ones(leaf.shape, leaf.dtype)
        elif drawn is None:
            drawn = _filler(leaf.shape, leaf.dtype.name, WEIGHT_SCALE)(key)
        if mesh is not None:
            placed = jax.device_put(drawn, param_shardings(mesh, {name: drawn})[name])
            drawn = jax.block_until_ready(placed)
        leaves.append(packed_params(drawn, leaf.dtype))
    return jax.tree.unflatten(tree, leaves)


@functools.cache
def _filler(shape: tuple[int, ...], dtype: str, scale: float) -> Any:
    """A compiled generator of one array; layers of equal shape share it."""
    coded = jnp.dtype(dtype) == CODES
    drawn = jnp.float32 if coded else jnp.dtype(dtype)

    def fill(key: jax.Array) -> jax.Array:
        numbers = scale * jax.random.normal(key, shape, drawn)
        return codes(rounded(numbers)) if coded else numbers

    return jax.jit(fill)


def _key(seed: int, number: int) -> jax.Array:
    """A key of the device's own generator: threefry would take seconds for billions of weights."""
    return jax.random.fold_in(jax.random.key(seed, impl="rbg"), number)


def filled_cache(target: TargetModel, batch: int, capacity: int, seed: int = 2) -> KVCache:
    """A cache that looks as if a prompt had been prefilled into all of it."""
    empty = jax.eval_shape(functools.partial(target.allocate, batch, capacity))

    leaves, structure = jax.tree.flatten(empty)
    return structure.unflatten(
        _filler(leaf.shape, leaf.dtype.name, 1.0)(_key(seed, index))
        for index, leaf in enumerate(leaves)
    )


def draft_state(model: Model, drafter: Drafter, batch: int, capacity: int = 8) -> Any:
    """The draft state after a short random prompt, in caches of ``capacity`` tokens."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, 8))
    tokens, mesh = jnp.asarray(prompt, jnp.int32), model.target.mesh
    return _after(model.config, drafter, capacity, mesh, model.params, tokens)


@functools.partial(jax.jit, static_argnames=("config", "drafter", "capacity", "mesh"))
def _after(
    config: TargetConfig,
    drafter: Drafter,
    capacity: int,
    mesh: AbstractMesh | None,
    params: Params,
    tokens: jax.Array,
) -> Any:
    batch, prompt = tokens.shape
    none, all_ = (jnp.full((batch,), count, jnp.int32) for count in (0, prompt))
    with use_mesh(mesh):
        state = drafter.begin(params, batch, capacity)
        features = random_features(config, drafter.needs, batch, prompt)
        return drafter.extend(params, state, Committed(tokens, none, all_, features))


def random_features(config: TargetConfig, needs: Needs, batch: int, tokens: int) -> Features:
    """Random features of the kinds that a drafter needs."""
    heads, dtype = (config.num_heads, config.num_kv_heads), jnp.dtype(config.dtype)

    def drawn(layer: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(layer), (batch, tokens, *shape), dtype)

    width = config.head_width
    return Features(
        {layer: drawn(layer, config.model_width) for layer in needs.hidden},
        {layer: drawn(layer, heads[0], width) for layer in needs.queries},
        {layer: drawn(layer, heads[1], width) for layer in needs.keys},
    )


def abstract(tree: Any) -> Any:
    """What a pytree's arrays are like: compiling from it neither holds nor donates them."""

    def like(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        place = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(like, tree)
