"""What a training run is, as frozen dataclasses, and how a config file becomes them.

Each field is declared here once; :mod:`longspec_jax.recipes` holds the values and the config files
override them. The conversion is strict both ways: a key no field takes and a field no key fills are
errors.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec_jax.config import TargetConfig


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 once: all that are left."""

    data: int
    fsdp: int
    tp: int

    def resolve(self, devices: int) -> tuple[int, int, int]:
        """Sizes whose product is the device count where an axis is -1."""
        sizes = (self.data, self.fsdp, self.tp)
        if sizes.count(-1) > 1:
            raise ValueError(f"only one mesh axis may be -1, got data, fsdp, tp = {sizes}")
        rest = devices
        for size in sizes:
            rest = rest // size if size > 0 else rest
        data, fsdp, tp = (max(1, rest) if size == -1 else size for size in sizes)
        return data, fsdp, tp


@dataclass(frozen=True)
class CorpusConfig:
    """Permissively licensed code and documentation, gathered from this Python installation."""

    held_out: tuple[str, ...]
    """Distributions kept out of training; those that are installed give the held-out documents."""
    vocab_size: int
    """Entries of the byte-level BPE tokenizer trained on it."""
    max_bytes: int
    """Most bytes of training text; 0 for all there is."""
    max_distribution_bytes: int
    """Most bytes from one distribution, so that no project dominates."""
    tokenizer_bytes: int
    """Bytes of text the tokenizer is trained on."""
    tokenizer: str = ""
    """Folder or hub id of a model whose tokenizer is used; one is trained if empty."""
    folder: str = ""
    """Where texts and tokens are kept, for several runs to share; ``workdir/corpus`` if empty."""

    def place(self, workdir: Path) -> Path:
        """The folder, of a run that works in ``workdir``."""
        return Path(self.folder).expanduser() if self.folder else workdir / "corpus"


MOST_BUCKETS = 8


@dataclass(frozen=True)
class DataConfig:
    """Where rows come from: files or hub, a corpus, or synthetic rows."""

    files: str
    """Comma-separated paths or patterns of json, jsonl, text or parquet files; instead of
    ``hub``."""
    hub: str
    """A dataset on the Hugging Face hub, ``owner/name``, or one file of it, ``owner/name/file``."""
    split: str
    """The split of a whole hub dataset."""
    pack: bool
    """Concatenate documents and cut rows of full length, masks and all; otherwise one truncated
    document per row."""
    mask_prompts: bool
    """Learn answers only (the paper's last stage); otherwise all text but the system prompt."""
    answer_room: int
    """Tokens left for the answer when a masked prompt is shortened; packed ones are not."""
    turn: str
    """How a conversation's turn is written, with ``{role}`` and ``{content}``."""
    max_bad_rows: int
    """Rows of files or hub that may be skipped because they hold no document; 0 refuses the first
    one."""
    synthetic_rows: int
    """Random rows of this number, for trying a set-up without data."""
    begin_rows: bool = False
    """Begin every packed row with the tokenizer's first token, as prompts begin. Otherwise a row
    begins wherever the one before it was cut, and the model seldom sees that token at position
    0."""
    corpus: CorpusConfig | None = None
    buckets: int = 1
    """Lengths that documents are padded to, if they are not packed: the stage's and its halves. A
    step has rows of one of them, shorter ones as many more."""

    stream: bool = False
    """Read the hub data once, as a stream, straight into tokens on disk, instead of downloading
    them first; of a data set too large for this machine's disk only the tokens are kept."""

    @classmethod
    def whole(cls, files: str, hub: str, split: str) -> "DataConfig":
        """Documents as they are, for commands that make no rows of them."""
        return cls(
            files=files,
            hub=hub,
            split=split,
            pack=True,
            mask_prompts=False,
            answer_room=0,
            turn="",
            max_bad_rows=0,
            synthetic_rows=0,
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """The fields that say where rows come from, of those that are set; should be one."""
        given = {
            "files": self.files,
            "hub": "" if self.files else self.hub,
            "synthetic_rows": self.synthetic_rows,
            "corpus": self.corpus,
        }
        return tuple(name for name, value in given.items() if value)

    @property
    def reads_documents(self) -> bool:
        """Whether rows are documents of files or of the hub, not made by the run."""
        return self.sources == ("files",) or self.sources == ("hub",)

    def __post_init__(self) -> None:
        if self.max_bad_rows < 0:
            raise ValueError(
                f"max_bad_rows={self.max_bad_rows} of the data is no number of rows; give 0 or more"
            )
        if self.begin_rows and self.reads_documents and not self.pack:
            raise ValueError(
                "--config.data.begin_rows is of packed rows, and each of these is one document, "
                "which begins with that token anyway; set it to False, or --config.data.pack"
            )
        if not 1 <= self.buckets <= MOST_BUCKETS:
            raise ValueError(
                f"--config.data.buckets={self.buckets} must be 1 to {MOST_BUCKETS}: each is another"
                " program to compile"
            )
        if self.stream and self.sources != ("hub",):
            raise ValueError(
                "--config.data.stream reads hub data: set --config.data.hub=NAME and no other "
                "source, or stream to False"
            )
        if self.buckets > 1 and (self.pack or self.corpus or self.synthetic_rows):
            raise ValueError(
                f"--config.data.buckets={self.buckets} is for rows of one document each, and these "
                "are full; set it to 1, or pack to False"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with clipping."""

    b1: float
    b2: float
    eps: float
    clip: float
    """Largest global norm of a gradient."""
    weight_decay: float
    decay_all: bool
    """Decay norms and biases too, as the published trainer does."""
    warmup: float
    """Fraction of a stage that warms up."""
    floor: float
    """Last learning rate, as a fraction of the peak."""


@dataclass(frozen=True)
class DraftSettings:
    """The draft and its random transforms."""

    window: int
    """Past tokens its self-attention sees."""
    init: str
    """Folder or hub id of a draft to start from; fresh if empty."""
    anchor_offset: bool
    """Use anchor-offset positions in the stages that set a ``max_offset``."""
    max_sinks: int
    """Most positions that stay in place."""
    max_shift: int
    """Most tokens the draft runs ahead of the target's keys."""
    per_row: bool
    """One draw of offset and shift per row; otherwise one per micro-batch, as in the published
    code."""
    distillation: float = 0.0
    """Share of the divergence from the target's own distribution in what is learned, 0 to 1; the
    rest is the cross-entropy of the text, which is all the paper learns."""

    rollout: int = 0
    """Levels of the draft's own chain that are learned together, each where the levels before it
    were right; 0: one shift per row, drawn, as in the paper."""
    rollout_decay: float = 0.8
    """Weight of a level over that of the one before."""

    def __post_init__(self) -> None:
        if self.rollout < 0 or not 0.0 < self.rollout_decay <= 1.0:
            raise ValueError(
                f"--config.draft.rollout={self.rollout} levels with rollout_decay="
                f"{self.rollout_decay}: give 0 or more levels, and a decay above 0 and at most 1"
            )
        if self.rollout and self.distillation:
            raise ValueError(
                "--config.draft.rollout and distillation are two ways to learn; set one of them "
                "to 0"
            )
        if not 0.0 <= self.distillation <= 1.0:
            raise ValueError(
                f"--config.draft.distillation={self.distillation} is no share of the loss; give 0 "
                "to 1"
            )


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go besides ``metrics.jsonl``; each needs the extra of its name."""

    tensorboard: bool = False
    """Event files in ``workdir/tensorboard``."""
    wandb: str = ""
    """Project of Weights & Biases; none if empty."""

    def __post_init__(self) -> None:
        if wrong := sorted(set(self.wandb) & set("/\\#?%:")):
            raise ValueError(
                f"--config.log.wandb={self.wandb} is no project of Weights & Biases, whose names "
                f"are without {' '.join(wrong)}; the owner goes into the variable WANDB_ENTITY"
            )

    @property
    def extras(self) -> tuple[str, ...]:
        """The extras that must be installed."""
        return ("tensorboard",) * self.tensorboard + ("wandb",) * bool(self.wandb)


@dataclass(frozen=True)
class StageConfig:
    """Training at one sequence length, until steps, epochs or time are up, what comes first."""

    name: str
    seq_len: int
    batch: int
    """Rows of one optimiser step, over all devices."""
    accumulation: int
    """Micro-batches a step is made of; 0: the fewest of at most 16k tokens per device, or one row
    where that is longer."""
    learning_rate: float
    steps: int
    """Optimiser steps; 0: as many as the epochs give, or unlimited."""
    epochs: int
    """Passes over the data; 0: unlimited."""
    max_seconds: float
    """Training time, compilation apart; 0: unlimited. The schedule follows the clock if it is
    faster."""
    max_offset: int
    """Largest anchor offset, as far as the target's positions reach; 0 keeps positions plain."""
    data: DataConfig | None = None
    """Where the stage's rows come from; the run's data if absent."""

    def __post_init__(self) -> None:
        if self.accumulation and self.batch % self.accumulation:
            raise ValueError(
                f"stage {self.name}: batch={self.batch} rows do not split into "
                f"accumulation={self.accumulation} micro-batches; choose a divisor, or 0 for as "
                "many as fit the devices"
            )
        if not (self.steps or self.epochs or self.max_seconds):
            raise ValueError(
                f"stage {self.name} would never end: set one of steps, epochs and max_seconds"
            )

    @property
    def data_section(self) -> str:
        """The section of the configuration, as it is typed, that says where its rows come from."""
        return f"stages.{self.name}.data" if self.data else "data"

    def limit(self, per_epoch: int) -> int:
        """Steps after which it ends whatever the clock says; 0 if time alone ends it.

        Args:
          per_epoch: steps that a pass over the data takes.
        """
        limits = (self.steps, self.epochs * per_epoch)
        return min((limit for limit in limits if limit), default=0)


@dataclass(frozen=True)
class PretrainingConfig:
    """A target trained from scratch before its draft: the demo."""

    shape: TargetConfig
    stages: tuple[StageConfig, ...]


@dataclass(frozen=True)
class RunConfig:
    """A whole training run."""

    seed: int
    target: str
    """Folder or hub id of the frozen target; empty where pretraining makes one."""
    revision: str
    """Revision of a hub target; the newest if empty."""
    dtype: str
    """Parameters and activations of the step; masters and optimiser are float32."""
    export: str
    """Folder for the draft in the released format; ``workdir/draft`` if empty."""
    title: str
    """A sentence for the model card."""
    loss_chunk: int
    """Most tokens of a device whose logits exist at once; 0: as many as take a gigabyte."""
    mlp_chunk: int
    """Most tokens of a device whose MLP activations exist at once; 0: all of up to 16384, 8192 of
    more. The draft's MLP, which has a backward pass, goes in chunks of half as many."""
    target_loss_every: int
    """Steps between those that report the target's own loss, a check on the positions that costs 4
    to 7 % of such a step; 0 for none. With distillation it comes for nothing, at every step."""
    log_every: int
    save_every: int
    """Steps between checkpoints; 0 saves at the end of a stage and on a signal only."""
    accept_every: int
    """Steps between measurements of simulated acceptance; 0 for the end of a stage only."""
    accept_rows: int
    """Rows one such measurement reads."""
    accept_seq_len: int
    """Tokens of those rows; 0 for the stage's own length."""
    max_to_keep: int
    mesh: MeshConfig
    data: DataConfig
    draft: DraftSettings
    optimizer: OptimizerConfig
    stages: tuple[StageConfig, ...]
    """Run from short to long sequences."""
    pretraining: PretrainingConfig | None = None
    log: LogConfig = LogConfig()
    profile_at: int = 0
    """Step of every stage at which a trace of the profiler begins; 0: no trace, for step 0
    compiles."""
    profile_steps: int = 0
    """Steps that are traced."""

    def __post_init__(self) -> None:
        if bool(self.target) == (self.pretraining is not None):
            raise ValueError(
                "a run needs a target: set --config.target=FOLDER_OR_HUB_ID, or leave it empty in "
                f"a config that trains one; got target={self.target!r} and "
                f"{'a' if self.pretraining else 'no'} pretraining section"
            )
        if self.mlp_chunk < 0 or self.target_loss_every < 0:
            raise ValueError(
                f"--config.mlp_chunk={self.mlp_chunk} tokens, --config.target_loss_every="
                f"{self.target_loss_every} steps: give 0 or more of both"
            )
        if self.dtype == "float16":
            raise ValueError(
                "dtype='float16' is for decoding: its gradients vanish without a scaled loss; "
                "train in bfloat16, or in float32 where the device has no bfloat16"
            )
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r} is not supported; choose bfloat16 or float32")
        if (self.profile_at, self.profile_steps) != (0, 0):
            if self.profile_at < 1 or self.profile_steps < 1:
                raise ValueError(
                    f"--config.profile_at={self.profile_at} with --config.profile_steps="
                    f"{self.profile_steps} traces nothing: give each at least 1 (step 0 of a stage "
                    "compiles), or leave both at 0"
                )
        self._check_sources()
        for stage in self.stages:
            data = stage.data or self.data
            if stage.seq_len % (1 << (data.buckets - 1)):
                raise ValueError(
                    f"stage {stage.name}: seq_len={stage.seq_len} cannot be halved "
                    f"{data.buckets - 1} times, as data.buckets={data.buckets} asks for; choose a "
                    "seq_len with more factors of 2, or fewer buckets"
                )
            cuts = data.mask_prompts and not data.pack
            if cuts and stage.seq_len <= data.answer_room:
                raise ValueError(
                    f"stage {stage.name}: rows of seq_len={stage.seq_len} leave nothing of a "
                    f"masked prompt before answer_room={data.answer_room}; lower "
                    f"--config.{stage.data_section}.answer_room or choose longer rows"
                )

    def _check_sources(self) -> None:
        """Refuse a stage without a source of rows, one with several, and a source nobody reads."""
        own = [stage for stage in self.stages if stage.data is not None]
        if self.data.sources and self.stages and len(own) == len(self.stages):
            first = own[0].name
            raise ValueError(
                f"--config.data.{self.data.sources[0]} is read by no stage: each of "
                f"{', '.join(stage.name for stage in own)} has data of its own; set "
                f"--config.stages.{first}.data.files=PATHS, or choose the variant of one stage, "
                f"such as --config=NAME:{first}"
            )
        read = {stage.data_section: stage.data for stage in own}
        if len(own) < len(self.stages) or self.pretraining is not None:
            read["data"] = self.data
        for where, data in read.items():
            if data is not None and len(data.sources) != 1:
                raise ValueError(
                    f"training needs exactly one source of data, {where} names "
                    f"{' and '.join(data.sources) or 'none'}; set --config.{where}.files=PATHS or "
                    f"--config.{where}.hub=NAME and leave the others empty"
                )

    def runs_of_stages(self) -> "tuple[RunConfig, ...]":
        """For every stage the run of it alone, with its data in place of the run's."""
        return tuple(
            dataclasses.replace(
                self,
                data=stage.data or self.data,
                stages=(dataclasses.replace(stage, data=None),),
            )
            for stage in self.stages
        )


def from_config(values: Mapping[str, Any]) -> RunConfig:
    """The run that a config file and its overrides describe."""
    return _build(RunConfig, values, "config")


def _build(cls: Any, values: Mapping[str, Any], path: str) -> Any:
    """An instance of a dataclass from a mapping with exactly its fields."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(fields)}"
            raise ValueError(f"{path} has no field {name!r}{hint}")
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise ValueError(
            f"{path} lacks {', '.join(missing)}; longspec_jax.recipes.base_config gives their "
            "values"
        )
    kinds = typing.get_type_hints(cls)
    return cls(**{n: _convert(kinds[n], v, f"{path}.{n}") for n, v in values.items()})


def _convert(kind: Any, value: Any, path: str) -> Any:
    """A value of a field's type."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        if value is None:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, path)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(value, Mapping):
            return _stages(item, value, path)
        return tuple(_convert(item, each, path) for each in value)
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{path}={value!r} must be of type {kind.__name__}")
    return value


def _stages(kind: Any, sections: Mapping[str, Any], path: str) -> tuple[Any, ...]:
    """Named stages, from short to long sequences: a ConfigDict forgets the order of writing."""
    built = [_build(kind, {"name": n, **s}, f"{path}.{n}") for n, s in sections.items()]
    return tuple(sorted(built, key=lambda stage: (stage.seq_len, stage.name)))
