"""The paper's claims at small scale: a 107 M parameter target and drafts that differ in one thing.

    python -m train.run --config=small_scale:target --workdir=runs/small/target
    python -m train.run --config=small_scale:offset --config.seed=1 --workdir=runs/small/offset-1

The first command gathers the corpus (source code and documentation of the Python distributions
installed next to this project) and trains the target; the second trains a draft, once for each
variant and seed. docs/archive/reproduction.md has the results.

Variants: ``target``; ``plain``, ``offset`` and ``offset0``, drafts without anchor-offset positions,
with them, and with them but without positions that stay in place; ``long_only``, without the stage
of short rows, at as many floating-point operations; ``shift1``, which never runs ahead of the
target's keys by more than one token; ``distilled``, which learns the target's own distribution.
Drafts of other kinds, at as many floating-point operations as ``distilled``: ``parallel``, of three
layers and blocks of six, ``eagle3``, only on short rows, and ``small_lm``, a language model of
5.6 M parameters.
``tiny`` in front of a variant (``tiny_plain``) is the same in miniature, for a CPU.
Hardware: two H200s for the target, about 8 minutes; one for a draft, 1 to 3 minutes.
"""

from ml_collections import ConfigDict

from longspec_jax.recipes import base_config, code_corpus, miniature, small_llama, stage

CONTEXT = 16384
SHORT_STEPS, LONG_STEPS = 120, 50
LONG_ONLY_STEPS = 110
"""If there is only the long stage: as many floating-point operations as both stages."""
PARALLEL_STEPS, EAGLE3_STEPS, SMALL_LM_STEPS = (97, 39), 92, (166, 69)
"""Of other kinds: as many floating-point operations as a distilled draft."""
TARGET = "runs/small/target/target"
CORPUS = "runs/small/corpus"


def get_config(variant: str = "target") -> ConfigDict:
    """The configuration of a variant."""
    name = variant.removeprefix("tiny_")
    changes = {
        "target": _target,
        "plain": _plain,
        "offset": lambda config: None,
        "offset0": lambda config: config.draft.update(max_sinks=0),
        "long_only": _long_only,
        "shift1": lambda config: config.draft.update(max_shift=1),
        "distilled": lambda config: config.draft.update(distillation=1.0),
        "parallel": _parallel,
        "eagle3": _eagle3,
        "small_lm": _small_lm,
    }
    if name not in changes:
        known = ", ".join(changes)
        raise ValueError(f"small_scale has no variant {variant!r}; choose one of {known}")
    config = _common()
    changes[name](config)
    if variant != name:
        miniature(config)
        if name == "eagle3":
            config.draft.update(vocabulary=256, layers="0,1")
        if name == "small_lm":
            config.draft.update(width=32, mlp_width=48, heads=2, kv_heads=1)
    return config


def _common() -> ConfigDict:
    """What all drafts share."""
    config = base_config()
    config.target = TARGET
    config.mesh = dict(data=1, fsdp=1, tp=1)
    config.save_every = 0
    config.accept_every = 0
    config.accept_rows = 8
    config.accept_seq_len = CONTEXT
    config.optimizer.warmup = 0.1
    config.optimizer.floor = 0.02
    config.data.begin_rows = True
    config.data.corpus = code_corpus(16384, CORPUS)
    config.stages = dict(
        short=stage(1024, 256, 2e-3, steps=SHORT_STEPS, max_offset=CONTEXT - 1024, accumulation=0),
        long=stage(CONTEXT, 16, 5e-4, steps=LONG_STEPS, accumulation=0),
    )
    return config


def _target(config: ConfigDict) -> None:
    """Only the target."""
    config.target = ""
    config.mesh = dict(data=-1, fsdp=1, tp=1)
    config.log_every = 20
    config.stages = dict()
    config.pretraining = dict(
        shape=small_llama(16384, 1024, 2816, 16, kv_heads=4, positions=CONTEXT),
        stages=dict(
            short=stage(2048, 128, 1.5e-3, max_seconds=270.0, accumulation=0),
            long=stage(CONTEXT, 16, 6e-4, max_seconds=100.0, accumulation=0),
        ),
    )


def _plain(config: ConfigDict) -> None:
    config.draft.anchor_offset = False


def _long_only(config: ConfigDict) -> None:
    del config.stages.short
    config.stages.long.update(steps=LONG_ONLY_STEPS, learning_rate=2e-3)


def _parallel(config: ConfigDict) -> None:
    config.draft = dict(kind="parallel")
    config.stages.short.steps, config.stages.long.steps = PARALLEL_STEPS


def _eagle3(config: ConfigDict) -> None:
    config.draft = dict(kind="eagle3", vocabulary=8192, steps=5)
    del config.stages.long
    config.stages.short.update(steps=EAGLE3_STEPS, max_offset=0)


def _small_lm(config: ConfigDict) -> None:
    config.draft = dict(
        kind="small_lm", layers=2, width=256, mlp_width=704, heads=4, kv_heads=2, distillation=1.0
    )
    config.stages.short.update(steps=SMALL_LM_STEPS[0], max_offset=0)
    config.stages.long.steps = SMALL_LM_STEPS[1]
