"""Run the frozen target once over all rows of a stage, and store what its draft reads.

Rows go through the target as many at a time as in a micro-batch of training, so that the same
matmuls compute the same bits.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from longspec_jax.config.names import BATCH_AXES
from longspec_jax.ops.partitioned import use_mesh

from .config import LogConfig, RunConfig
from .data.batches import bucket_lengths
from .drafts.base import TrainContext
from .features import Part, create
from .pipeline import (
    PlannedStage,
    Stored,
    begin_draft,
    mlp_chunk_of,
    open_run,
    plan_draft,
    stored_of,
)
from .views import parts_of_rows


def store_features(config: RunConfig, workdir: Path) -> list[str]:
    """Store the features of every stage that can read them; a sentence for every stage.

    Raises:
      ValueError: if the features of something else are there.
    """
    if config.pretraining is not None and not (workdir / "target" / "config.json").is_file():
        raise ValueError(
            "this configuration trains its target, which is not there yet; store features when it "
            "is, or set --config.features.folder=''"
        )
    run = open_run(replace(config, log=LogConfig()), workdir)
    plans = plan_draft(run)
    given, begun = begin_draft(run, plans)
    lines = []
    for plan in plans:
        stored = stored_of(plan, begun.trainer, given.target)
        if stored is None:
            lines.append(f"stage {plan.config.name} draws positions: nothing is stored")
        else:
            lines.append(_store(plan, given, stored))
    run.metrics.close()
    return lines


def _store(plan: PlannedStage, given: TrainContext, stored: Stored) -> str:
    """Store the features of a stage; a sentence about them."""
    run = plan.run
    rows = plan.config.batch // plan.config.accumulation
    sharding = NamedSharding(run.mesh, P(BATCH_AXES))
    compute = partial(parts_of_rows, given.target, stored.reads, mlp_chunk_of(plan))

    def parts_of(tokens: PyTree) -> PyTree:
        with use_mesh(run.mesh.abstract_mesh):
            return compute(given.params, tokens)

    shapes = jax.eval_shape(parts_of, jax.ShapeDtypeStruct((rows, plan.config.seq_len), np.int32))
    features = create(
        stored.folder,
        stored.about,
        [Part(name, each.dtype.name, each.shape[2:]) for name, each in shapes.items()],
        plan.rows.lengths(),
        together=rows,
        longest=plan.config.seq_len,
    )

    def computed(chosen: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
        """The parts of every row, without padding."""
        lengths = features.lengths[chosen]
        buckets = bucket_lengths(plan.config.seq_len, run.config.data.buckets)
        length = next(each for each in buckets if each >= lengths.max())
        # The last rows are filled up with the first of them.
        tokens = np.stack([plan.rows[int(row)].tokens[:length] for row in np.resize(chosen, rows)])
        found = jax.device_get(parts_of(jax.device_put(tokens, sharding)))
        for index, size in enumerate(lengths):
            yield {name: part[index, :size] for name, part in found.items()}

    for shard in range(features.shards):
        if not features.is_whole(shard):
            all_rows = features.rows_of(shard)
            chunks = [all_rows[at : at + rows] for at in range(0, len(all_rows), rows)]
            features.write(shard, [row for chunk in chunks for row in computed(chunk)])
    size = int(features.lengths.sum()) * features.token_bytes
    return (
        f"stage {plan.config.name}: {len(features.lengths)} rows in {stored.folder}, "
        f"{features.token_bytes} bytes a token, {size / 1e9:.3f} GB"
    )
