"""What a training run is, as frozen dataclasses with the range of every number.

Each field is declared here once, with its default: the paper's, if the paper has one.
:mod:`longspec_jax.recipes` and the config files say what differs.
:func:`longspec_jax.schema.build` checks types and ranges; rules that concern several fields are
checked by the dataclasses themselves.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from longspec_jax import cli
from longspec_jax.checks import LARGEST_NUMBER, OneOf, Real, Rule, That, Whole
from longspec_jax.config import loading
from longspec_jax.config.target import TargetConfig
from longspec_jax.recipes import LLAMA_TURN, SEED
from longspec_jax.schema import build

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_BUCKETS = 8
SMALLEST_VOCABULARY = 259
"""Of a byte-level tokenizer: every byte, and three special tokens."""


@dataclass(frozen=True)
class _AxisSize(Whole):
    """A number of devices."""

    def refusal(self, value: object) -> str | None:
        """At least one, or -1."""
        if super().refusal(value) is None and value != 0:
            return None
        return "a number of devices, at least 1, or -1 for the rest"


class _Free:
    """The type of :data:`FREE`."""


FREE = _Free()
"""Marks a field that may differ between a run and its resume: it changes neither the batches nor
the mathematics, or what it names counts by its content (:mod:`train.fingerprint`)."""
AtLeastOne = Annotated[int, Whole(1)]
ZeroOrMore = Annotated[int, Whole(0)]
Share = Annotated[float, Real(0, 1)]
BelowOne = Annotated[float, Real(0, 1 - 1e-9, "from 0 to below 1")]
Amount = Annotated[float, Real(0, LARGEST_NUMBER)]
Positive = Annotated[float, Real(0, LARGEST_NUMBER, includes_least=False)]
AxisSize = Annotated[int, _AxisSize(-1)]
LayerNumbers = Annotated[
    str,
    That(
        lambda text: (
            isinstance(text, str) and re.fullmatch(r"([0-9]{1,4}(,[0-9]{1,4})*)?", text) is not None
        ),
        "numbers of layers with commas between, such as 1,15,28, or empty",
    ),
]
Template = Annotated[
    str,
    That(
        lambda text: isinstance(text, str) and "{content}" in text,
        "a template with {content}, and usually {role}",
    ),
]


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 once: all that are left."""

    data: AxisSize = 1
    fsdp: AxisSize = -1
    tp: AxisSize = 1

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
    vocab_size: Annotated[int, Whole(SMALLEST_VOCABULARY)]
    """Entries of the byte-level BPE tokenizer trained on it."""
    max_bytes: ZeroOrMore = 0
    """Most bytes of training text; 0 for all there is."""
    max_distribution_bytes: AtLeastOne = 25_000_000
    """Most bytes from one distribution, so that no project dominates."""
    tokenizer_bytes: AtLeastOne = 40_000_000
    """Bytes of text the tokenizer is trained on."""
    tokenizer: str = ""
    """Folder or hub id of a model whose tokenizer is used; one is trained if empty."""
    folder: str = ""
    """Where texts and tokens are kept, for several runs to share; ``workdir/corpus`` if empty."""

    def place(self, workdir: Path) -> Path:
        """The folder, of a run that works in ``workdir``."""
        return Path(self.folder).expanduser() if self.folder else workdir / "corpus"


@dataclass(frozen=True)
class DataConfig:
    """Where rows come from: files, the hub, or a corpus."""

    files: Annotated[str, FREE] = ""
    """Comma-separated paths or patterns of json, jsonl, text or parquet files; instead of
    ``hub``."""
    hub: Annotated[str, FREE] = ""
    """A dataset on the Hugging Face hub, ``owner/name``, or one file of it, ``owner/name/file``."""
    split: Annotated[str, FREE] = "train"
    """The split of a whole hub dataset."""
    pack: bool = False
    """Concatenate documents and cut rows of full length, masks and all; otherwise one truncated
    document per row."""
    mask_prompts: bool = False
    """Learn answers only (the paper's last stage); otherwise all text but the system prompt."""
    answer_room: ZeroOrMore = 1024
    """Tokens left for the answer when a masked prompt is shortened; packed ones are not."""
    turn: Template = LLAMA_TURN
    """How a conversation's turn is written, with ``{role}`` and ``{content}``."""
    max_bad_rows: Annotated[ZeroOrMore, FREE] = 0
    """Rows of files or hub that may be skipped because they hold no document; 0 refuses the first
    one."""
    begin_rows: bool = False
    """Begin every packed row with the tokenizer's first token, as prompts begin. Otherwise a row
    begins wherever the one before it was cut, and the model seldom sees that token at position
    0."""
    corpus: Annotated[CorpusConfig | None, FREE] = None
    buckets: Annotated[int, Whole(1, MOST_BUCKETS, ": each is another program to compile")] = 1
    """Lengths that documents are padded to, if they are not packed: the stage's and its halves. A
    step has rows of one of them, shorter ones as many more."""
    stream: Annotated[bool, FREE] = False
    """Read the hub data once, as a stream, straight into tokens on disk, instead of downloading
    them first; of a data set too large for this machine's disk only the tokens are kept."""

    @classmethod
    def whole(cls, options: argparse.Namespace) -> "DataConfig":
        """Documents as they are, for commands that make no rows of them."""
        return cls(options.files or "", options.hub or "", options.split, pack=True)

    @property
    def sources(self) -> tuple[str, ...]:
        """The fields that name where rows come from and are set; exactly one should be."""
        given = {"files": self.files, "hub": "" if self.files else self.hub, "corpus": self.corpus}
        return tuple(name for name, value in given.items() if value)

    @property
    def reads_documents(self) -> bool:
        """Whether rows are documents of files or of the hub, not made by the run."""
        return self.sources == ("files",) or self.sources == ("hub",)

    def __post_init__(self) -> None:
        if self.begin_rows and self.reads_documents and not self.pack:
            raise ValueError(
                "--config.data.begin_rows is for packed rows, and these are one document each, "
                "which begins with that token anyway; set it to False, or --config.data.pack"
            )
        if self.stream and self.sources != ("hub",):
            raise ValueError(
                "--config.data.stream reads hub data: set --config.data.hub=NAME and no other "
                "source, or stream to False"
            )
        if self.buckets > 1 and (self.pack or self.corpus):
            raise ValueError(
                f"--config.data.buckets={self.buckets} is for rows of one document each, and these "
                "are full; set it to 1, or pack to False"
            )


def add_documents(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a target and documents, for commands next to the training."""
    parser.add_argument("--target", required=True, help="folder or hub id, with its tokenizer")
    cli.add_options(parser, {"revision": loading.OPTIONS["revision"]})
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--files", help="comma-separated json, jsonl, text or parquet files")
    data.add_argument("--hub", help="a data set on the hub, owner/name or owner/name/file")
    parser.add_argument("--split", default="train", help="split of a hub data set")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with clipping."""

    b1: BelowOne = 0.9
    b2: BelowOne = 0.95
    eps: Positive = 1e-6
    clip: Positive = 1.0
    """Largest global norm of a gradient."""
    weight_decay: Amount = 0.1
    decay_all: bool = False
    """Decay norms and biases too, as the published trainer does."""
    warmup: Share = 0.1
    """Fraction of a stage that warms up."""
    floor: Share = 1e-4
    """Last learning rate, as a fraction of the peak."""


@dataclass(frozen=True)
class DraftSettings:
    """What every kind of draft has; :mod:`train.drafts.kinds` knows the kinds and their fields."""

    kind: str
    """The kind of draft that is trained."""
    init: Annotated[str, FREE] = ""
    """Folder or hub id of a draft to start from; fresh if empty."""


@dataclass(frozen=True)
class FeaturesConfig:
    """Stored features: what drafts read of the frozen target, written once and read every epoch."""

    folder: str = ""
    """Where ``python -m train.prepare`` stores them and training reads them, a folder in it for
    every stage; the target runs in every step if empty."""


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
                f"--config.log.wandb={self.wandb} must be the name of a project, without "
                f"{' '.join(wrong)}; the variable WANDB_ENTITY names the owner"
            )

    @property
    def extras(self) -> tuple[str, ...]:
        """The extras that must be installed."""
        return ("tensorboard",) * self.tensorboard + ("wandb",) * bool(self.wandb)


@dataclass(frozen=True)
class StageConfig:
    """Training at one sequence length, until steps, epochs or time are up, whichever is first."""

    name: str
    seq_len: Annotated[int, Whole(2)]
    batch: AtLeastOne
    """Rows of one optimiser step, over all devices."""
    accumulation: Annotated[ZeroOrMore, FREE]
    """Micro-batches a step is made of; 0: the fewest of at most 16k tokens per device, or one row
    where that is longer."""
    learning_rate: Positive
    steps: ZeroOrMore
    """Optimiser steps; 0: as many as the epochs give, or unlimited."""
    epochs: ZeroOrMore
    """Passes over the data; 0: unlimited."""
    max_seconds: Amount
    """Training time, compilation apart; 0: unlimited. The schedule follows the clock if it is
    faster."""
    max_offset: ZeroOrMore
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
        """The section of the configuration, as it is typed, that names its data."""
        return f"stages.{self.name}.data" if self.data else "data"

    def limit(self, per_epoch: int) -> int:
        """Steps after which it ends even if time is left; 0 if only time ends it.

        A pass over the data takes ``per_epoch`` steps.
        """
        limits = (self.steps, self.epochs * per_epoch)
        return min((limit for limit in limits if limit), default=0)


@dataclass(frozen=True)
class _ByName(Rule):
    """Stages by name; they run from short to long sequences, as a mapping has no order to keep."""

    def refusal(self, value: object) -> str | None:
        """Not a mapping of mappings."""
        if isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in value.values()):
            return None
        return "sections of stages by their names"

    def read(self, name: str, value: object, row: int | None = None) -> tuple[StageConfig, ...]:
        """The stages."""
        sections = super().read(name, value, row)
        for stage, section in sections.items():
            if "name" in section:
                raise ValueError(
                    f"{name}.{stage}.name: a stage has the name of its section; rename {stage}"
                )
        stages = [
            build(StageConfig, {"name": stage, **section}, f"{name}.{stage}.")
            for stage, section in sections.items()
        ]
        return tuple(sorted(stages, key=lambda stage: (stage.seq_len, stage.name)))


Stages = Annotated[tuple[StageConfig, ...], _ByName()]


def check_lengths(
    stages: Iterable[StageConfig], accept_seq_len: int, name: str, most: int, section: str
) -> None:
    """Refuse rows that are longer than a target's positions.

    Messages have the ``name`` of the largest length, and the stages' section.
    """
    for stage in stages:
        if max(stage.seq_len, accept_seq_len) > most:
            raise ValueError(
                f"--config.{section}.{stage.name}.seq_len={stage.seq_len} and "
                f"--config.accept_seq_len={accept_seq_len} must be at most {name}={most}"
            )


@dataclass(frozen=True)
class PretrainingConfig:
    """A target trained from scratch before its draft: the demo."""

    shape: TargetConfig
    stages: Stages


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole training run."""

    seed: ZeroOrMore = SEED
    target: Annotated[str, FREE] = ""
    """Folder or hub id of the frozen target; empty where pretraining makes one."""
    revision: Annotated[str, FREE] = ""
    """Revision of a hub target; the newest if empty."""
    dtype: Annotated[
        str, OneOf(("bfloat16", "float32"), "; gradients vanish in float16 without a scaled loss")
    ] = "bfloat16"
    """Parameters and activations of the step; masters and optimiser are float32."""
    export: Annotated[str, FREE] = ""
    """Folder for the draft in the released format; ``workdir/draft`` if empty."""
    loss_chunk: Annotated[ZeroOrMore, FREE] = 0
    """Most tokens of a device whose logits exist at once; 0: as many as take a gigabyte."""
    mlp_chunk: Annotated[ZeroOrMore, FREE] = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all of up to 16384, 8192 of
    more. The draft's MLP, which has a backward pass, goes in chunks of half as many."""
    log_every: Annotated[AtLeastOne, FREE] = 1
    """Steps from one record of the metrics to the next."""
    save_every: Annotated[ZeroOrMore, FREE] = 200
    """Steps between checkpoints; 0 saves at the end of a stage and on a signal only."""
    accept_every: Annotated[ZeroOrMore, FREE] = 100
    """Steps between measurements of simulated acceptance; 0 for the end of a stage only."""
    accept_rows: Annotated[AtLeastOne, FREE] = 8
    """Rows one such measurement reads."""
    accept_seq_len: Annotated[ZeroOrMore, FREE] = 0
    """Tokens of those rows; 0 for the stage's own length."""
    max_to_keep: Annotated[AtLeastOne, FREE] = 2
    """Intact checkpoints of a stage that are kept."""
    mesh: Annotated[MeshConfig, FREE] = MeshConfig()
    data: DataConfig = DataConfig()
    draft: DraftSettings
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: Annotated[Stages, FREE]
    """Run from short to long sequences."""
    pretraining: Annotated[PretrainingConfig | None, FREE] = None
    log: Annotated[LogConfig, FREE] = LogConfig()
    features: Annotated[FeaturesConfig, FREE] = FeaturesConfig()
    adapter: Annotated[str, FREE] = ""
    """Folder of a LoRA adapter that is merged into the target; its content counts as the target's
    does."""

    def __post_init__(self) -> None:
        if bool(self.target) == (self.pretraining is not None):
            raise ValueError(
                "a run needs a target: set --config.target=FOLDER_OR_HUB_ID, or leave it empty in "
                f"a config that trains one; got target={self.target!r} and "
                f"{'a' if self.pretraining else 'no'} pretraining section"
            )
        if not self.stages and self.pretraining is None:
            raise ValueError("a run needs stages: --config.stages holds none")
        if (made := self.pretraining) is not None:
            most = "--config.pretraining.shape.max_positions", made.shape.max_positions
            check_lengths(made.stages, self.accept_seq_len, *most, section="pretraining.stages")
        self._check_sources()
        for stage in self.stages:
            data = stage.data or self.data
            if stage.seq_len % (1 << (data.buckets - 1)):
                raise ValueError(
                    f"stage {stage.name}: seq_len={stage.seq_len} cannot be halved "
                    f"{data.buckets - 1} times, as data.buckets={data.buckets} needs; choose a "
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
        """Refuse a stage without a source or with several, and data that no stage reads."""
        own = [stage for stage in self.stages if stage.data is not None]
        taken = [vars(each) for each in (DataConfig(), *(stage.data for stage in own))]
        unread = [k for k, v in vars(self.data).items() if all(v != each[k] for each in taken)]
        if unread and len(own) == len(self.stages) and self.pretraining is None:
            first = own[0].name
            raise ValueError(
                f"--config.data.{unread[0]} is read by no stage: each of "
                f"{', '.join(stage.name for stage in own)} has data of its own; set "
                f"--config.stages.{first}.data.{unread[0]}, or choose the variant of one stage, "
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

    def found_target(self, workdir: Path) -> Path:
        """The target's folder or GGUF file, fetched if need be, or where it will be trained.

        Raises:
          FileNotFoundError: if one is named and cannot be had.
        """
        from longspec_jax.weights.hub import local_model  # Late: the hub's client is slow.

        revision = self.revision or None
        return local_model(self.target, revision) if self.target else workdir / "target"

    def identity(self, stage: StageConfig, shape: TargetConfig | None = None) -> dict[str, Any]:
        """What a resumed run of a stage must have in common with the one before it.

        All fields of a draft's stage that are not :data:`FREE`, by their names as they are typed;
        of a stage that trains a target, those without the draft's, and its ``shape``. The digests
        of data and models come to them (:func:`train.pipeline.plan_stage`).
        """
        values = _counted(self)
        stages = {stage.name: _counted(stage)}
        del stages[stage.name]["name"]
        if shape is not None:
            del values["draft"]
            return _typed({**values, "pretraining": {"shape": asdict(shape), "stages": stages}})
        return _typed({**values, "stages": stages})

    def runs_of_stages(self) -> "tuple[RunConfig, ...]":
        """For every stage a run of only that stage, with its data in place of the run's."""
        return tuple(
            dataclasses.replace(
                self, data=stage.data or self.data, stages=(dataclasses.replace(stage, data=None),)
            )
            for stage in self.stages
        )


def _counted(section: "DataclassInstance") -> dict[str, Any]:
    """The fields of a section that are not free, and those of the sections in it."""
    hints = get_type_hints(type(section), include_extras=True)
    names = [field.name for field in dataclasses.fields(section)]
    values = {name: getattr(section, name) for name in names if FREE not in get_args(hints[name])}
    return {
        name: value if not is_dataclass(value) or isinstance(value, type) else _counted(value)
        for name, value in values.items()
    }


def _typed(values: Mapping[str, Any], prefix: str = "--config.") -> dict[str, Any]:
    """Fields by their names as they are typed."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_typed(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
