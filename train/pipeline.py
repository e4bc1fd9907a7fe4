"""A whole run: data, a target (trained here or loaded), the draft's stages, the exports.

Everything lives in the working folder, and whatever is there already is not made again; the same
command therefore resumes an interrupted run wherever it stopped.
"""

import dataclasses
import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from longspec_jax.config import DraftConfig
from longspec_jax.sharding import make_mesh
from longspec_jax.weights.hf import load_draft, load_target, save_draft, save_target
from train.card import write_card
from train.checkpoint import Checkpoints
from train.config import CorpusConfig, DataConfig, PretrainingConfig, RunConfig, StageConfig
from train.corpus import build_corpus, read_texts
from train.data import Batches, PackedRows, Rows, SyntheticRows, read_tokens, write_tokens
from train.documents import DocumentRows, load_documents, parse, to_turns
from train.loop import Stage, run_stage
from train.metrics import Metrics
from train.objectives import DraftObjective, TargetObjective
from train.optim import make_optimizer
from train.passes import cast
from train.step import ROWS, Batch, Objective, initial_state, make_step, state_shardings
from train.tokenizer import encode_documents, load_tokenizer, train_tokenizer


@dataclass
class Run:
    """What the parts of a run share."""

    config: RunConfig
    workdir: Path
    mesh: Mesh
    metrics: Metrics

    @property
    def target_source(self) -> str:
        """Where the target is, or will be once it is trained."""
        return self.config.target or str(self.workdir / "target")

    @property
    def draft_folder(self) -> Path:
        """Where the draft is exported to."""
        return Path(self.config.export or self.workdir / "draft")


def train(config: RunConfig, workdir: Path) -> None:
    """Do everything the configuration asks for.

    Raises:
      ValueError: if configuration, data and models do not fit together.
      FileNotFoundError: if a model or file is missing.
      Interrupted: after a signal, with the state saved.
    """
    started = time.time()
    mesh = make_mesh(*config.mesh.resolve(len(jax.devices())))
    workdir.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(workdir / "metrics.jsonl")
    run = Run(config, workdir, mesh, metrics)
    if config.data.corpus is not None:
        prepare_corpus(run, config.data.corpus)
    if config.pretraining is not None and not Path(run.target_source, "config.json").is_file():
        pretrain(run, config.pretraining)
    if config.stages:
        train_draft(run)
    metrics.close()
    if jax.process_index() == 0:
        write_card(run.workdir, config, seconds=time.time() - started)


def prepare_corpus(run: Run, config: CorpusConfig) -> None:
    """Corpus, tokenizer and token files; whatever exists is kept."""
    folder = run.workdir / "corpus"
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
        path = folder / f"{name}.npy"
        if not path.is_file():
            tokenizer = load_tokenizer(run.workdir / "tokenizer")
            parts = encode_documents(tokenizer, read_texts(folder / f"{name}.jsonl"))
            started = time.monotonic()
            count = write_tokens(path, parts, len(tokenizer))
            seconds = time.monotonic() - started
            run.metrics.write("corpus", 0, {f"{name}_tokens": count, "seconds": seconds})


def pretrain(run: Run, config: PretrainingConfig) -> None:
    """Train the target from scratch and save it, its tokenizer beside it."""
    shape = dataclasses.replace(config.shape, dtype=run.config.dtype)
    tokenizer = load_tokenizer(run.workdir / "tokenizer")
    if len(tokenizer) > shape.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries, the target's vocab_size={shape.vocab_size}; "
            "make the target's at least as large"
        )
    objective = TargetObjective(shape, run.config.loss_chunk)
    params = None
    for stage in config.stages:
        params = _train_stage(run, stage, objective, (), params, shape.vocab_size)
    folder = Path(run.target_source)
    tokenizer.save_pretrained(folder)
    save_target(folder, shape, cast(params, shape.dtype), stop_tokens=(tokenizer.eos_token_id,))


def train_draft(run: Run) -> None:
    """Train the draft through its stages and export it."""
    config = run.config
    revision = config.revision or None
    target, frozen = load_target(
        run.target_source, dtype=config.dtype, mesh=run.mesh, revision=revision
    )
    draft, params = DraftConfig.for_target(target, window=config.draft.window), None
    if config.draft.init:
        draft, params = load_draft(config.draft.init, target, dtype="float32", mesh=run.mesh)
        draft = dataclasses.replace(draft, dtype=config.dtype, window=config.draft.window)
    for stage in config.stages:
        objective = DraftObjective(target, draft, config.draft, stage.max_offset, config.loss_chunk)
        params = _train_stage(run, stage, objective, frozen, params, target.vocab_size)
    save_draft(run.draft_folder, draft, cast(params, draft.dtype), target=target)


def _train_stage(
    run: Run, stage: StageConfig, objective: Objective, frozen: Any, params: Any, vocab_size: int
) -> Any:
    """Masters after a stage that starts from the given ones."""
    config = run.config
    kind = "draft" if frozen else "target"
    optimizer = make_optimizer(config.optimizer)
    shardings = state_shardings(run.mesh, objective, optimizer)
    # Every stage has its own randomness; its name is what tells it from the others.
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}/{stage.name}".encode()).digest()[:4])
    state = initial_state(objective, optimizer, shardings, seed, params)
    rows = make_rows(run, stage.seq_len, vocab_size)
    plan = Stage(
        dataclasses.replace(stage, name=f"{kind}_{stage.name}"),
        objective,
        make_step(objective, optimizer, seed, run.mesh, shardings),
        frozen,
        Batches(rows, stage.batch, stage.accumulation, seed),
        _held_out(run, stage, vocab_size),
    )
    checkpoints = Checkpoints(run.workdir / "checkpoints" / plan.config.name, config.max_to_keep)
    try:
        return run_stage(plan, state, config, run.mesh, checkpoints, run.metrics).params
    finally:
        checkpoints.close()


def make_rows(run: Run, seq_len: int, vocab_size: int) -> Rows:
    """The training rows of the configured source."""
    data = run.config.data
    if data.synthetic_rows:
        return SyntheticRows(data.synthetic_rows, seq_len, vocab_size)
    if data.corpus is not None:
        return PackedRows(read_tokens(run.workdir / "corpus" / "train.npy"), seq_len)
    tokenizer = load_tokenizer(run.target_source, run.config.revision or None)
    if data.pack:
        return PackedRows(_packed_tokens(run, data, tokenizer), seq_len)
    return DocumentRows(load_documents(data), tokenizer, data, seq_len)


def _packed_tokens(run: Run, data: DataConfig, tokenizer: Any) -> Any:
    """All documents of files or a hub data set as one memory-mapped run of tokens."""
    about = (data.files, data.hub, data.split, run.target_source)
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    path = run.workdir / f"tokens-{digest}.npy"
    if not path.is_file():
        documents = (to_turns(parse(row)) for row in load_documents(data))
        texts = ("\n\n".join(turn.content for turn in turns) for turns in documents)
        write_tokens(path, encode_documents(tokenizer, texts), len(tokenizer))
    return read_tokens(path)


def _held_out(run: Run, stage: StageConfig, vocab_size: int) -> Batch:
    """Rows to measure on: the held-out documents, or the last training rows where there are none."""
    config = run.config
    seq_len = config.accept_seq_len or stage.seq_len
    if config.data.corpus is not None:
        rows: Rows = PackedRows(read_tokens(run.workdir / "corpus" / "heldout.npy"), seq_len)
    else:
        rows = make_rows(run, seq_len, vocab_size)
    columns = run.mesh.shape["data"] * run.mesh.shape["fsdp"]
    count = -(-config.accept_rows // columns) * columns
    if len(rows) < count:
        raise ValueError(
            f"measuring acceptance needs {count} rows of {seq_len} tokens, the data give {len(rows)}; "
            "lower accept_rows or accept_seq_len, or give more data"
        )
    # Evenly spread, so that all held-out documents have a say.
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    sharding = NamedSharding(run.mesh, jax.sharding.PartitionSpec(*ROWS[1:]))
    tokens, weights = (jnp.stack(part) for part in zip(*chosen, strict=True))
    return jax.device_put(Batch(tokens, weights), sharding)


def _sample(path: Path, size: int) -> Any:
    """Texts of a corpus file, evenly spread, of about this many bytes in all."""
    every = max(1, path.stat().st_size // max(1, size))
    return (text for index, text in enumerate(read_texts(path)) if index % every == 0)
