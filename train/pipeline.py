"""A whole run: data, a target (trained here or loaded), the draft's stages, the exports.

Everything lives in the working folder, and whatever is there already is not made again; the same
command therefore resumes an interrupted run wherever it stopped. ``config.json`` is written once
the data of all stages have been read and their checkpoints compared with the configuration: a
command that is refused changes no run, and no folder of another program.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from longspec_jax import files
from longspec_jax.config.target import TargetConfig
from longspec_jax.sharding import make_mesh
from longspec_jax.weights.hf import load_target, load_target_config, save_target

from .checkpoint import Checkpoints, newest_saved
from .config import PretrainingConfig, RunConfig, StageConfig, check_lengths
from .data.batches import Batches
from .data.corpus import prepare_corpus
from .data.rows import Rows, token_counts
from .data.source import Source
from .data.tokens import load_tokenizer
from .drafts.base import DraftTrainer, InitialDraft, TrainContext
from .drafts.kinds import KINDS
from .features import Features, open_features
from .fingerprint import Fingerprint, check_same_run, fingerprint, model_digest
from .loop import Stage, run_stage
from .losses import tokens_at_once
from .metrics import Metrics, open_writers
from .processes import by_first, gathered
from .step import Batch, Objective, cast, initial_state, make_optimizer, make_step, state_shardings
from .target import TargetObjective, mlp_tokens_at_once
from .views import Reads

TOKENS_PER_DEVICE = 16384
"""Of a micro-batch: enough for the matrix units, and little next to the weights of a 7B target."""


@dataclass
class TrainingRun:
    """What the parts of a run share."""

    config: RunConfig
    workdir: Path
    mesh: Mesh
    metrics: Metrics
    data_section: str = "data"
    """Of the configuration, as it was typed, in which the data are described."""

    @property
    def target_source(self) -> str:
        """Where the target is, or will be once it is trained."""
        return self.config.target or str(self.workdir / "target")


def train(config: RunConfig, workdir: Path) -> None:
    """Train what a configuration describes.

    Raises:
      ValueError: if configuration, data and models do not fit together, or the working folder
        belongs to something else.
      FileNotFoundError: if a model or file is missing.
      Interrupted: after a signal, with the state saved.
    """
    run = open_run(config, workdir)
    others = files.alone(workdir, "--workdir") if jax.process_index() == 0 else nullcontext()
    with others:
        if config.pretraining is not None:
            pretrain(run, config.pretraining)
        if config.stages:
            train_draft(run)
        run.metrics.close()


def open_run(config: RunConfig, workdir: Path) -> TrainingRun:
    """A run in its working folder, with its corpus if it makes one; raises as :func:`train`."""
    check_workdir(workdir)
    _check_clocks(config)
    mesh = make_mesh(*config.mesh.resolve(len(jax.devices())))
    files.make_folder(workdir, "--workdir")
    metrics = Metrics(workdir / "metrics.jsonl", open_writers(config, workdir))
    run = TrainingRun(config, workdir, mesh, metrics)
    if (corpus := config.data.corpus) is not None:
        record = partial(metrics.write, "corpus", 0)
        by_first(
            "corpus",
            lambda: prepare_corpus(corpus, workdir, config.found_target(workdir), record),
        )
    return run


def check_workdir(workdir: Path) -> None:
    """Refuse a folder in which a run would replace files that no run has written.

    Raises:
      ValueError: names the file.
    """
    config = workdir / "config.json"
    if config.exists() and not _is_run(config):
        raise ValueError(
            f"{config} was not written by a training run and would be replaced; choose another "
            "--workdir"
        )


def _check_clocks(config: RunConfig) -> None:
    """Refuse stages that each of several processes would end by its own clock."""
    pretraining = config.pretraining.stages if config.pretraining else ()
    for stage in (*pretraining, *config.stages):
        if stage.max_seconds and jax.process_count() > 1:
            raise ValueError(
                f"stage {stage.name}: max_seconds={stage.max_seconds} would end each process by "
                "its own clock; with several processes limit the stage by steps or epochs"
            )


def _is_run(path: Path) -> bool:
    """Whether a file is the ``config.json`` of a run."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and {"stages", "optimizer", "draft"} <= values.keys()


class PlannedStage(NamedTuple):
    """A stage whose data have been read, before anything is trained."""

    run: TrainingRun
    """With the stage's own data."""
    config: StageConfig
    """With micro-batches that spread over the devices."""
    name: str
    """Of its checkpoints and records, such as ``draft_short``."""
    rows: Rows
    held_out: Batch
    """One micro-batch that is never trained on."""
    fingerprint: Fingerprint


def plan_stage(
    run: TrainingRun, stage: StageConfig, kind: str, vocab_size: int, identity: Fingerprint
) -> PlannedStage:
    """Read the data of a stage from end to end; their digest completes the stage's identity."""
    source = Source(run.config, run.workdir, run.target_source, vocab_size, run.data_section)
    rows, held_out = source.split(stage, run.mesh)
    if len(rows) < stage.batch:
        stages = "stages" if kind == "draft" else "pretraining.stages"
        raise ValueError(
            f"the data gives {len(rows)} rows, a step needs {stage.batch}; set "
            f"--config.{stages}.{stage.name}.batch to at most {len(rows)}, or give more data"
        )
    data = {"data and tokenizer": source.fingerprint(), "rows to train on": len(rows)}
    return PlannedStage(run, stage, f"{kind}_{stage.name}", rows, held_out, {**identity, **data})


def settle(run: TrainingRun, plans: Sequence[PlannedStage]) -> None:
    """Write ``config.json``, unless a stage has a checkpoint of another run.

    Raises:
      ValueError: names what differs.
    """
    for plan in plans:
        saved = newest_saved(_checkpoints(plan))
        if saved is not None:
            check_same_run(saved.meta["run"], plan.fingerprint, saved.folder)
    text = json.dumps(dataclasses.asdict(run.config), indent=1) + "\n"
    by_first("config", lambda: files.replace(run.workdir / "config.json", text.encode()))


def _checkpoints(plan: PlannedStage) -> Path:
    return plan.run.workdir / "checkpoints" / plan.name


def pretrain(run: TrainingRun, config: PretrainingConfig) -> None:
    """Train the target from scratch and save it, its tokenizer next to it.

    Raises:
      ValueError: if it was trained before, by another run.
    """
    shape = dataclasses.replace(config.shape, dtype=run.config.dtype)
    tokenizer = load_tokenizer(run.workdir / "tokenizer")
    if len(tokenizer) > shape.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries, the target's "
            f"vocab_size={shape.vocab_size}; make the target's at least as large"
        )
    plans = []
    for stage in config.stages:
        stage = with_micro_batches(stage, run.mesh)
        identity = run.config.identity(stage, shape)
        plans.append(plan_stage(run, stage, "target", shape.vocab_size, identity))
    settle(run, plans)
    if Path(run.target_source, "config.json").is_file():
        return
    objective = TargetObjective(shape, run.config.loss_chunk or tokens_at_once(shape.vocab_size))
    params = None
    for plan in plans:
        params = _train_stage(plan, objective, (), params)
    whole = gathered(cast(params, shape.dtype))
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)

    def save() -> None:
        tokenizer.save_pretrained(run.target_source)
        save_target(run.target_source, shape, whole, stop_tokens=end)

    by_first("target", save)


def train_draft(run: TrainingRun) -> None:
    """Train the draft through its stages and export it."""
    config = run.config
    plans = plan_draft(run)
    settle(run, plans)
    given, (trainer, frozen, params) = begin_draft(run, plans)
    stored = [stored_features(plan, trainer, given.target) for plan in plans]
    loss_chunk = config.loss_chunk or tokens_at_once(given.target.vocab_size)
    for plan, features in zip(plans, stored, strict=True):
        objective = trainer.objective(plan.config, loss_chunk, mlp_chunk_of(plan))
        params = _train_stage(plan, objective, frozen, params, features)
    whole = gathered(cast(params, given.dtype))
    folder = Path(config.export or run.workdir / "draft")
    by_first("draft", lambda: trainer.save(folder, whole))


def plan_draft(run: TrainingRun) -> list[PlannedStage]:
    """Read the data of all stages of the draft."""
    config = run.config
    target = load_target_config(
        run.target_source, dtype=config.dtype, revision=config.revision or None
    )
    most = "the target's max_positions", target.max_positions
    check_lengths(config.stages, config.accept_seq_len, *most, section="stages")
    models = _models(run)
    plans = []
    for part in _stage_by_stage(run):
        [stage] = part.config.stages
        identity = {**part.config.identity(stage), **models}
        plans.append(plan_stage(part, stage, "draft", target.vocab_size, identity))
    return plans


def begin_draft(
    run: TrainingRun, plans: Sequence[PlannedStage]
) -> tuple[TrainContext, InitialDraft]:
    """The target, loaded, and the draft before its first step."""
    config = run.config
    # Every step multiplies thousands of rows, for which weights in their own bits are dequantised.
    target, frozen = load_target(
        run.target_source,
        dtype=config.dtype,
        mesh=run.mesh,
        revision=config.revision or None,
        adapter=config.adapter or None,
        packed=False,
    )
    given = TrainContext(
        target,
        frozen,
        tuple(plan.config for plan in plans),
        config.seed,
        config.dtype,
        run.mesh,
        lambda: token_counts([plan.rows for plan in plans], target.vocab_size),
    )
    return given, KINDS[config.draft.kind].begin(config.draft, given)


def mlp_chunk_of(plan: PlannedStage) -> int:
    """Most tokens of a device whose MLP activations exist at once in a stage; 0: all."""
    stage, axes = plan.config, plan.run.mesh.shape
    tokens = stage.seq_len * stage.batch // (stage.accumulation * axes["data"] * axes["fsdp"])
    return plan.run.config.mlp_chunk or mlp_tokens_at_once(tokens)


class Stored(NamedTuple):
    """What is stored of the target for a stage."""

    folder: Path
    reads: Reads
    about: Fingerprint
    """Of what target, data and kind it is."""


def stored_of(plan: PlannedStage, trainer: DraftTrainer, target: TargetConfig) -> Stored | None:
    """What is stored for a stage; None where it draws positions, or nothing is to be stored."""
    config, stage = plan.run.config, plan.config
    reads = trainer.reads(stage) if config.features.folder else None
    if reads is None:
        return None
    known = "the target", "data and tokenizer", "rows to train on"
    about = {name: plan.fingerprint[name] for name in known}
    about |= {"tokens of a row": stage.seq_len, "dtype": config.dtype}
    about["features"] = reads.words(target)
    folder = Path(config.features.folder).expanduser() / stage.name
    return Stored(folder, reads, about)


def stored_features(
    plan: PlannedStage, trainer: DraftTrainer, target: TargetConfig
) -> Features | None:
    """The features that a stage reads; None if it runs the target."""
    stored = stored_of(plan, trainer, target)
    if stored is None:
        return None
    return open_features(stored.folder, stored.about, plan.rows.lengths())


def _stage_by_stage(run: TrainingRun) -> list[TrainingRun]:
    """For every stage a run of only that stage, its micro-batches spread over the devices."""
    parts = []
    for typed, alone in zip(run.config.stages, run.config.runs_of_stages(), strict=True):
        [stage] = alone.stages
        settled = dataclasses.replace(alone, stages=(with_micro_batches(stage, run.mesh),))
        parts.append(dataclasses.replace(run, config=settled, data_section=typed.data_section))
    return parts


def _train_stage(
    plan: PlannedStage,
    objective: Objective,
    frozen: PyTree,
    params: PyTree,
    features: Features | None = None,
) -> PyTree:
    """Masters after a stage that starts from the given ones, or from fresh ones."""
    run, config = plan.run, plan.run.config
    optimizer = make_optimizer(config.optimizer)
    shardings = state_shardings(run.mesh, objective, optimizer)
    # Every stage has its own randomness, which follows from its name.
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}/{plan.config.name}".encode()).digest()[:4])
    state = initial_state(objective, optimizer, shardings, seed, params)

    stage = Stage(
        dataclasses.replace(plan.config, name=plan.name),
        objective,
        make_step(objective, optimizer, seed, run.mesh, shardings),
        frozen,
        Batches(
            plan.rows,
            plan.config.batch,
            plan.config.accumulation,
            seed,
            config.data.buckets,
            features=features,
        ),
        plan.held_out,
        plan.fingerprint,
    )
    checkpoints = Checkpoints(_checkpoints(plan), config.max_to_keep)
    try:
        return run_stage(stage, state, config, run.mesh, checkpoints, run.metrics).params
    finally:
        checkpoints.close()


def _models(run: TrainingRun) -> Fingerprint:
    """Digests of the frozen target, and of the draft that training starts from."""
    config = run.config
    models = {"the target": model_digest(run.target_source, config.revision or None)}
    if config.adapter:
        parts = {"target": models["the target"], "adapter": model_digest(config.adapter)}
        models["the target"] = fingerprint(parts)
    if config.draft.init:
        models["the draft it starts from"] = model_digest(config.draft.init)
    return models


def with_micro_batches(stage: StageConfig, mesh: Mesh) -> StageConfig:
    """The stage with micro-batches that spread over the devices, chosen if it leaves them open.

    Raises:
      ValueError: if its rows do not spread over the devices.
    """
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    most = shares * max(1, TOKENS_PER_DEVICE // stage.seq_len)
    fitting = (
        count
        for count in range(1, stage.batch + 1)
        if stage.batch % (count * shares) == 0 and stage.batch // count <= most
    )
    accumulation = stage.accumulation or next(fitting, 1)
    rows = stage.batch // accumulation
    if rows % shares:
        raise ValueError(
            f"stage {stage.name}: a micro-batch of {rows} rows (batch={stage.batch} / accumulation="
            f"{accumulation}) does not spread over mesh data x fsdp = {shares}; change "
            f"--config.stages.{stage.name}.batch, its accumulation, or --config.mesh"
        )
    return dataclasses.replace(stage, accumulation=accumulation)
