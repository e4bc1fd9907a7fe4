"""The demo: a 7 M parameter target of the Llama family and its LongSpec draft, both from scratch.

    python -m train.run --config=configs/demo.py --workdir=runs/demo

Data: permissively licensed source code and documentation of the Python distributions installed
next to this project, gathered by the run itself; ``held_out`` names what it never trains on.
Hardware: one H200, about 15 minutes in all (an estimate; every stage is limited by
``max_seconds``).
Variants: ``demo.py:smoke`` runs the same shapes for seconds each, ``demo.py:tiny`` suits a CPU.
Without anchor-offset, at the same budget: ``--config.draft.anchor_offset=False``.

``demo.py:draft`` trains only a draft, for the target that comes with the package:

    python -m train.run --config=configs/demo.py:draft --workdir=runs/demo_draft

``demo.py:eagle3`` trains an EAGLE-3 draft for the same target, likewise in fixed steps, and
``demo.py:eagle3_cpu`` one in a quarter of an hour on a CPU, on rows of 256 tokens. Such a draft
sees only a window of the last tokens:

    python -m train.run --config=configs/demo.py:eagle3_cpu --workdir=runs/demo_eagle3
    python -m infer.decode --target=demo --draft=runs/demo_eagle3/draft

``demo.py:dflash`` trains a DFlash draft for the same target on the same rows, and
``demo.py:dflash_cpu`` one in a quarter of an hour on a CPU.

``demo.py:parallel`` trains a parallel LongSpec draft for the same target, in the same stages.

``demo.py:small_lm`` trains a small language model for the same target: 1.2 M parameters (2.3 MB),
about 6 minutes on one H200, an estimate.
"""

from ml_collections import ConfigDict

from longspec_jax.embedded import demo_target
from longspec_jax.recipes import base_config, code_corpus, miniature, small_llama, stage

CONTEXT = 16384


def get_config(variant: str = "full") -> ConfigDict:
    """The configuration of a variant, one of those above."""
    changes = {
        "full": _full,
        "draft": _draft,
        "eagle3": _eagle3,
        "eagle3_cpu": _eagle3_cpu,
        "dflash": _dflash,
        "dflash_cpu": _dflash_cpu,
        "parallel": _parallel,
        "smoke": _smoke,
        "tiny": _tiny,
        "small_lm": _small_lm,
    }
    if variant not in changes:
        raise ValueError(f"demo has no variant {variant!r}; choose one of {', '.join(changes)}")
    config = base_config()
    config.log_every = 20
    config.save_every = 0
    config.accept_every = 400
    config.accept_rows = 8
    config.accept_seq_len = CONTEXT
    config.loss_chunk = 32768
    config.mesh = dict(data=1, fsdp=1, tp=1)
    config.optimizer.warmup = 0.05
    config.optimizer.floor = 0.02
    config.data.corpus = code_corpus(4096)
    config.pretraining = dict(
        shape=small_llama(4096, 256, 704, 4, kv_heads=2, positions=CONTEXT),
        stages=dict(
            short=stage(2048, 128, 3e-3, max_seconds=250.0),
            long=stage(CONTEXT, 16, 1e-3, max_seconds=90.0),
        ),
    )
    # The default tree has five levels, so the draft runs up to five tokens past the target's last
    # key.
    config.draft.max_shift = 5
    config.stages = dict(
        # 1024 tokens at positions up to the context's end: short rows, long positions.
        short=stage(1024, 256, 2e-3, max_seconds=120.0, max_offset=CONTEXT - 1024),
        long=stage(CONTEXT, 16, 5e-4, max_seconds=90.0),
    )
    changes[variant](config)
    return config


def _full(config: ConfigDict) -> None:
    """The demo as shipped."""


def _draft(config: ConfigDict) -> None:
    """Another draft for the target that is there, in fixed steps."""
    config.target = config.data.corpus.tokenizer = str(demo_target())
    config.data.begin_rows = True
    del config.pretraining
    config.stages.short.update(steps=1500, max_seconds=0.0)
    config.stages.long.update(steps=1500, max_seconds=0.0)


def _eagle3(config: ConfigDict) -> None:
    """An EAGLE-3 draft for the target that is there."""
    _draft(config)
    config.draft = dict(kind="eagle3", vocabulary=2048)
    config.stages.short.max_offset = 0


def _eagle3_cpu(config: ConfigDict) -> None:
    """The same in little time: short rows, fewer passes of the training-time test."""
    _eagle3(config)
    config.draft.steps = 4
    _on_a_cpu(config)


def _dflash(config: ConfigDict) -> None:
    """A DFlash draft for the target that is there."""
    _draft(config)
    config.draft = dict(kind="dflash", layers=2, block=8, decay=4.0, mask_token=2)
    config.stages.short.max_offset = 0


def _dflash_cpu(config: ConfigDict) -> None:
    """The same in little time: short rows."""
    _dflash(config)
    _on_a_cpu(config)


def _on_a_cpu(config: ConfigDict) -> None:
    config.dtype = "float32"
    config.accept_rows, config.accept_seq_len, config.accept_every = 8, 0, 100
    config.stages = dict(short=stage(256, 4, 2e-3, max_seconds=600.0))


def _parallel(config: ConfigDict) -> None:
    """A parallel LongSpec draft for the target that is there."""
    _draft(config)
    config.draft = dict(kind="parallel")


def _smoke(config: ConfigDict) -> None:
    """The same shapes for seconds each: shows errors early and fills the compilation cache."""
    config.data.corpus.max_bytes = 15_000_000
    for each in (*config.pretraining.stages.values(), *config.stages.values()):
        each.max_seconds = 4.0


def _tiny(config: ConfigDict) -> None:
    """Minutes to seconds on a CPU: the whole path at miniature scale."""
    config.log_every = 1
    miniature(config)


def _small_lm(config: ConfigDict) -> None:
    """A small language model of the same vocabulary, for the target that is there."""
    _draft(config)
    config.draft = dict(kind="small_lm", layers=2, width=128, mlp_width=704, heads=4, kv_heads=2)
    config.stages = dict(
        short=stage(2048, 128, 4e-3, max_seconds=150.0),
        long=stage(CONTEXT, 16, 2e-3, max_seconds=60.0),
    )
