"""A whole run: data, a target (trained here or loaded), the draft's stages, the exports.

Everything lives in the working folder, and whatever is there already is not made again; the same
command therefore resumes an interrupted run wherever it stopped.
"""

import dataclasses
import hashlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from longspec_jax.config import TargetConfig
from longspec_jax.drafters.longspec.checkpoint import load_draft, save_draft
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.sharding import make_mesh
from longspec_jax.weights.hf import load_target, load_target_config, save_target

from .card import write_card
from .checkpoint import Checkpoints
from .config import CorpusConfig, PretrainingConfig, RunConfig, StageConfig
from .data.batches import Batches, Rows, write_tokens
from .data.corpus import build_corpus, read_texts, tokens_file
from .data.rows import Source
from .data.tokenizer import encode_documents, load_tokenizer, train_tokenizer
from .fingerprint import Fingerprint, draft_settings, model_digest, target_settings
from .flops import peak_tokens_per_second
from .loop import Stage, run_stage
from .losses import tokens_at_once
from .metrics import Metrics
from .objectives import DraftObjective, TargetObjective
from .optim import make_optimizer
from .passes import cast, mlp_tokens_at_once
from .processes import by_first, gathered
from .profiling import check_window
from .step import Batch, Objective, Step, initial_state, make_step, state_shardings
from .writers import open_writers

TOKENS_PER_DEVICE = 16384
"""Of a micro-batch: enough for the matrix units, and little beside the weights of a 7B target."""


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

    @property
    def draft_folder(self) -> Path:
        """Where the draft is exported to."""
        return Path(self.config.export or self.workdir / "draft")


def train(config: RunConfig, workdir: Path, command: str = "") -> None:
    """Do everything the configuration asks for.

    Args:
      config: the run.
      workdir: where everything is kept; shared by all processes.
      command: what started it, for the model card.

    Raises:
      ValueError: if configuration, data and models do not fit together.
      FileNotFoundError: if a model or file is missing.
      Interrupted: after a signal, with the state saved.
    """
    mesh = make_mesh(*config.mesh.resolve(len(jax.devices())))
    workdir.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(workdir / "metrics.jsonl", open_writers(config, workdir))
    run = TrainingRun(config, workdir, mesh, metrics)
    if config.data.corpus is not None:
        corpus = config.data.corpus
        by_first("corpus", lambda: prepare_corpus(run, corpus))
    if config.pretraining is not None and not Path(run.target_source, "config.json").is_file():
        pretrain(run, config.pretraining)
    if config.stages:
        train_draft(run)
    metrics.close()
    by_first("card", lambda: write_card(run.workdir, config, command))


def prepare_corpus(run: TrainingRun, config: CorpusConfig) -> None:
    """Corpus, tokenizer and token files; whatever exists is kept."""
    folder = config.place(run.workdir)
    if config.tokenizer and not (run.workdir / "tokenizer").is_dir():
        # Before the corpus, which takes minutes: one that is missing is said at once.
        load_tokenizer(config.tokenizer).save_pretrained(run.workdir / "tokenizer")
    if not (folder / "sources.json").is_file():
        build_corpus(config, folder)
        shutil.copy(folder / "sources.json", run.workdir / "sources.json")
    if not (run.workdir / "tokenizer").is_dir():
        # A target that is already there brings the tokenizer it was trained with.
        target = Path(run.target_source)
        if (target / "tokenizer.json").is_file():
            tokenizer = load_tokenizer(target)
        else:
            texts = _sample(folder / "train.jsonl", config.tokenizer_bytes)
            tokenizer = train_tokenizer(texts, config.vocab_size)
        tokenizer.save_pretrained(run.workdir / "tokenizer")
    for name in ("heldout", "train"):
        path = tokens_file(folder, name, run.workdir / "tokenizer")
        if not path.is_file():
            tokenizer = load_tokenizer(run.workdir / "tokenizer")
            parts = encode_documents(tokenizer, read_texts(folder / f"{name}.jsonl"))
            started = time.monotonic()
            count = write_tokens(path, parts, len(tokenizer))
            seconds = time.monotonic() - started
            run.metrics.write("corpus", 0, {f"{name}_tokens": count, "seconds": seconds})


def pretrain(run: TrainingRun, config: PretrainingConfig) -> None:
    """Train the target from scratch and save it, its tokenizer beside it."""
    shape = dataclasses.replace(config.shape, dtype=run.config.dtype)
    tokenizer = load_tokenizer(run.workdir / "tokenizer")
    if len(tokenizer) > shape.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries, the target's "
            f"vocab_size={shape.vocab_size}; make the target's at least as large"
        )
    objective = TargetObjective(shape, run.config.loss_chunk or tokens_at_once(shape.vocab_size))
    params = None
    for stage in config.stages:
        stage = with_micro_batches(stage, run.mesh)
        settings = target_settings(run.config, shape, stage)
        data = StageData.of(run, stage, shape.vocab_size)
        params = _train_stage(run, stage, objective, (), params, data, settings)
    whole, end = gathered(cast(params, shape.dtype)), (tokenizer.eos_token_id,)

    def save() -> None:
        tokenizer.save_pretrained(run.target_source)
        save_target(run.target_source, shape, whole, stop_tokens=end)

    by_first("target", save)


def train_draft(run: TrainingRun) -> None:
    """Train the draft through its stages and export it."""
    config = run.config
    source = {"dtype": config.dtype, "revision": config.revision or None}
    target = load_target_config(run.target_source, **source)
    _check_fits(config, target)
    models, parts = _models(run), _stage_by_stage(run)
    # The rows of all stages are looked at before the first one takes its hours.
    data = [StageData.of(part, part.config.stages[0], target.vocab_size) for part in parts]
    rows_of = zip(config.stages, data, strict=True)
    check_window(config, [len(rows.rows) // stage.batch for stage, rows in rows_of])
    target, frozen = load_target(run.target_source, mesh=run.mesh, **source)
    draft, params = DraftConfig.for_target(target, window=config.draft.window), None
    if config.draft.init:
        draft, params = load_draft(config.draft.init, target, dtype="float32", mesh=run.mesh)
        draft = dataclasses.replace(draft, dtype=config.dtype, window=config.draft.window)
    chunk = config.loss_chunk or tokens_at_once(target.vocab_size)
    shares = run.mesh.shape["data"] * run.mesh.shape["fsdp"]
    for part, rows in zip(parts, data, strict=True):
        [stage] = part.config.stages
        tokens = stage.seq_len * stage.batch // (stage.accumulation * shares)
        telling = DraftObjective(
            target,
            draft,
            config.draft,
            stage.max_offset,
            chunk,
            config.mlp_chunk or mlp_tokens_at_once(tokens),
        )
        objective = dataclasses.replace(telling, target_loss=False)
        settings = {**draft_settings(part.config, stage), **models}
        more = None if config.draft.distillation else telling
        params = _train_stage(part, stage, objective, frozen, params, rows, settings, more)
    whole = gathered(cast(params, draft.dtype))
    by_first("draft", lambda: save_draft(run.draft_folder, draft, whole, target=target))


def _stage_by_stage(run: TrainingRun) -> list[TrainingRun]:
    """For every stage the run of it alone, its micro-batches spread over the devices."""
    parts = []
    for typed, alone in zip(run.config.stages, run.config.runs_of_stages(), strict=True):
        [stage] = alone.stages
        settled = dataclasses.replace(alone, stages=(with_micro_batches(stage, run.mesh),))
        parts.append(dataclasses.replace(run, config=settled, data_section=typed.data_section))
    return parts


def _check_fits(config: RunConfig, target: TargetConfig) -> None:
    """Refuse rows that are longer than the target's positions."""
    for stage in config.stages:
        longest = max(stage.seq_len, config.accept_seq_len)
        if longest > target.max_positions:
            raise ValueError(
                f"stage {stage.name} has rows of {longest} tokens, the target was made for "
                f"{target.max_positions} positions; set --config.stages.{stage.name}.seq_len and "
                "--config.accept_seq_len to at most that"
            )


class StageData(NamedTuple):
    """What a stage reads."""

    rows: Rows
    held_out: Batch
    """One micro-batch that is never trained on."""
    fingerprint: str

    @classmethod
    def of(cls, run: TrainingRun, stage: StageConfig, vocab_size: int) -> "StageData":
        """The data of a run's stage, looked at from end to end."""
        place = run.workdir, run.target_source
        source = Source(run.config, *place, vocab_size, run.data_section)
        rows, held_out = source.split(stage, run.mesh)
        if len(rows) < stage.batch:
            stages = "stages" if stage in run.config.stages else "pretraining.stages"
            raise ValueError(
                f"the data gives {len(rows)} rows, a step needs {stage.batch}; set "
                f"--config.{stages}.{stage.name}.batch to at most {len(rows)}, or give more data"
            )
        return cls(rows, held_out, source.fingerprint())


def _train_stage(
    run: TrainingRun,
    stage: StageConfig,
    objective: Objective,
    frozen: Any,
    params: Any,
    data: StageData,
    settings: Fingerprint,
    telling: Objective | None = None,
) -> Any:
    """Masters after a stage that starts from the given ones; ``settings`` are all that say how.

    ``telling`` is the objective where it has more to say, now and then.
    """
    config = run.config
    kind = "draft" if frozen else "target"
    optimizer = make_optimizer(config.optimizer)
    shardings = state_shardings(run.mesh, objective, optimizer)
    # Every stage has its own randomness; its name is what tells it from the others.
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}/{stage.name}".encode()).digest()[:4])
    state = initial_state(objective, optimizer, shardings, seed, params)

    def step_of(objective: Objective) -> Step:
        return make_step(objective, optimizer, seed, run.mesh, shardings)

    plan = Stage(
        dataclasses.replace(stage, name=f"{kind}_{stage.name}"),
        objective,
        step_of(objective),
        frozen,
        Batches(data.rows, stage.batch, stage.accumulation, seed, config.data.buckets),
        data.held_out,
        {**settings, "data and tokenizer": data.fingerprint, "rows to train on": len(data.rows)},
        lambda length: peak_tokens_per_second(
            objective, length, config.dtype, [*run.mesh.devices.flat]
        ),
        run.workdir / "profile",
        None if telling is None else step_of(telling),
    )
    checkpoints = Checkpoints(run.workdir / "checkpoints" / plan.config.name, config.max_to_keep)
    try:
        return run_stage(plan, state, config, run.mesh, checkpoints, run.metrics).params
    finally:
        checkpoints.close()


def _models(run: TrainingRun) -> Fingerprint:
    """What tells the frozen target, and the draft that training starts from."""
    config = run.config
    models = {"the target": model_digest(run.target_source, config.revision or None)}
    if config.draft.init:
        models["the draft it starts from"] = model_digest(config.draft.init)
    return models


def with_micro_batches(stage: StageConfig, mesh: Mesh) -> StageConfig:
    """The stage with micro-batches that spread over the devices, chosen if it leaves them open.

    Raises:
      ValueError: if its rows do not spread over the devices.
    """
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    accumulation = stage.accumulation
    if not accumulation and stage.batch % shares == 0:
        most = max(1, TOKENS_PER_DEVICE // stage.seq_len)
        per_device = stage.batch // shares
        rows = max(
            size for size in range(1, per_device + 1) if per_device % size == 0 and size <= most
        )
        accumulation = per_device // rows
    rows = stage.batch // (accumulation or 1)
    if rows % shares:
        raise ValueError(
            f"stage {stage.name}: a micro-batch of {rows} rows (batch={stage.batch} / accumulation="
            f"{accumulation or 1}) does not spread over mesh data x fsdp = {shares}; change "
            f"--config.stages.{stage.name}.batch, its accumulation, or --config.mesh"
        )
    return dataclasses.replace(stage, accumulation=accumulation)


def _sample(path: Path, size: int) -> Any:
    """Texts of a corpus file, evenly spread, of about this many bytes in all."""
    every = max(1, path.stat().st_size // max(1, size))
    return (text for index, text in enumerate(read_texts(path)) if index % every == 0)
