"""What training configurations are built from: turns, data, and the stages of the paper.

A configuration is a Python file anywhere with a function ``get_config([variant])``;
``train/config.py`` documents each field, and unknown ones are refused. A whole one for a
target of your own::

    from functools import partial

    from longspec_jax.recipes import paper_config

    get_config = partial(
        paper_config, "mine", target="owner/model", long_length=32768, max_offset=15_000
    )

The paper trains in three stages (LongSpec, section 3.2 and appendix). ``short`` teaches a fresh
draft on 1,024-token documents at anchor-offset positions, ``long`` continues with long documents at
plain positions, and ``sft`` with long questions of which only the answers are learned. The variant
``all`` is one resumable run of the three, each with data of its own, which
``--config.stages.short.data.files=PATHS`` replaces by local files. The variants ``short``, ``long``
and ``sft`` are one stage each, of ``--config.data``; the last two start from the draft of the one
before, which ``--config.draft.init`` names if it is elsewhere. The variant ``parallel`` is ``all``
for a parallel LongSpec draft.

The variants ``eagle3`` and ``dflash`` train other kinds of drafts for the same target, EAGLE-3
(arXiv 2503.01840) and DFlash (arXiv 2602.06036), in one stage of conversations. Only their answers
are learned. A draft is better where the answers are the target's own, which
``python -m train.regenerate`` makes of any. The variant ``small_lm`` trains a small language model
of the target's vocabulary from scratch: on the text of the first stage, then on conversations.

Hours in the configurations' docstrings are estimates, not measurements: floating-point operations
of target forward, draft forward and backward over all padded tokens, at half of an H200's bfloat16
matrix rate. Expected acceptance lengths are the paper's (its table of main results, temperature 0,
the paper's tree; bonus token included, prefill excluded).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ml_collections import ConfigDict  # Comes with the extra ``train`` only.

LLAMA_TURN = "<s>{role}\n{content}</s>\n"
"""The turn format of the LongSpec release for Llama, Vicuna and LongChat (not their own
templates)."""
LLAMA3_TURN = "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"
"""The turn format of the chat templates of Llama 3 and 3.1."""
CHATML_TURN = "<|im_start|>{role}\n{content}<|im_end|>\n"
"""The turn format of Qwen and QwQ, all generations."""
HARMONY_TURN = "<|start|>{role}<|message|>{content}<|end|>"
"""The turn format of gpt-oss, without the channels of an answer."""

SHORT_LENGTH = 1024
SHORT_DATA = "DKYoon/SlimPajama-6B"
LONG_DATA = "sail/longspec-data/long_data.jsonl"
SFT_DATA = "sail/longspec-data/long_sft_data.jsonl"
COT_DATA = "sail/longspec-data/long_cot_data.jsonl"
"""Reasoning traces, for models that think before they answer."""

CHAT_DATA, CHAT_SPLIT = "HuggingFaceH4/ultrachat_200k", "train_sft"
"""Conversations, a part of what EAGLE-3 was trained on."""

SEED = 42
HELD_OUT = "attrs", "jinja2", "networkx"
"""Distributions of installed text that no recipe trains on."""
STAGES = ("short", "long", "sft")


def base_config() -> "ConfigDict":
    """The sections of a configuration for a LongSpec draft; `train.config` has their values."""
    from ml_collections import ConfigDict

    sections = {name: {} for name in ("log", "features", "mesh", "optimizer", "stages")}
    return ConfigDict({**sections, "data": dict(turn=LLAMA_TURN), "draft": dict(kind="longspec")})


def stage(
    seq_len: int,
    batch: int,
    learning_rate: float,
    *,
    accumulation: int = 1,
    steps: int = 0,
    epochs: int | None = None,
    max_seconds: float = 0.0,
    max_offset: int = 0,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A stage of one epoch unless limits are given, on the data of all stages or on its own."""
    if epochs is None:
        epochs = 0 if steps or max_seconds else 1
    fields = dict(
        seq_len=seq_len,
        batch=batch,
        accumulation=accumulation,
        learning_rate=learning_rate,
        steps=steps,
        epochs=epochs,
        max_seconds=max_seconds,
        max_offset=max_offset,
    )
    return fields if data is None else {**fields, "data": data}


def code_corpus(vocab_size: int, folder: str = "") -> dict[str, Any]:
    """Source code and documentation of the Python distributions installed next to this project.

    Args:
      vocab_size: of the tokenizer that is trained on a part of it.
      folder: where it is kept for several runs; that of the run if empty.
    """
    return dict(held_out=HELD_OUT, vocab_size=vocab_size, folder=folder)


TEXT_DRAFTS: dict[str, dict[str, Any]] = {
    "text": dict(max_shift=5, distillation=0.9),
    "parallel": dict(kind="parallel", distillation=0.9),
    # 99.7 % of what a target of 151,936 tokens chooses on code are 32,000 of them.
    "eagle3": dict(kind="eagle3", vocabulary=32_000),
}
"""The drafts that :func:`installed_text_config` trains on text, by variant."""
ANSWERS = {"answers": "text", "parallel_answers": "parallel", "eagle3_answers": "eagle3"}
"""Its variants that go on with one of them on the target's own answers."""


def installed_text_config(
    name: str,
    variant: str = "text",
    *,
    target: str,
    vocab_size: int,
    long_length: int,
    turn: str,
    rows: int,
    seconds: tuple[float, float],
    eagle3: Mapping[str, Any] = {},
) -> "ConfigDict":
    """A draft of a released model in minutes, from text that is on every machine.

    Args:
      name: of the configuration file.
      variant: ``text`` trains a LongSpec draft on the source code and documentation installed here,
        short rows at anchor-offset positions and then long ones; ``eagle3`` and ``parallel`` train
        drafts of these kinds on the same rows. ``answers`` goes on with ``runs/NAME/draft`` on what
        the target itself wrote, ``runs/NAME/answers.jsonl``; ``eagle3_answers`` and
        ``parallel_answers`` find both in ``runs/NAME-eagle3`` and ``runs/NAME-parallel``.
      target: of :data:`longspec_jax.released.RELEASED`, a folder, a file or a hub id.
      vocab_size: of its tokenizer.
      long_length: tokens of a row in the stage of long rows; the offsets of the others reach it.
      turn: how its chat template writes a turn.
      rows: of 1,024 tokens in a step. Some thousand steps should fit into the first stage: in 83
        a draft learns little but how frequent tokens are.
      seconds: of the two stages of text.
      eagle3: what its EAGLE-3 draft has instead of a vocabulary of 32,000.
    """
    if variant not in (variants := (*TEXT_DRAFTS, *ANSWERS)):
        known = ", ".join(variants)
        raise ValueError(f"{name} has no variant {variant!r}; choose one of {known}")
    config, kind = base_config(), ANSWERS.get(variant, variant)
    draft, data = dict(TEXT_DRAFTS[kind]), dict[str, Any](turn=turn)
    offset, rate = long_length - 1024, 1e-3
    if kind == "eagle3":  # It attends to distances, of which short rows have few.
        offset, rate = 0, 3e-4
        draft.update(eagle3)
    if variant == kind:
        data.update(corpus={**code_corpus(vocab_size), "tokenizer": target})
        long_rows = max(2, rows * 1024 // long_length)
        first, second = seconds
        stages = dict(
            short=stage(1024, rows, rate, max_seconds=first, accumulation=0, max_offset=offset),
            long=stage(long_length, long_rows, 3e-4, max_seconds=second, accumulation=0),
        )
    else:
        folder = f"runs/{name}" if kind == "text" else f"runs/{name}-{kind}"
        draft.update(init=f"{folder}/draft")
        data.update(files=f"{folder}/answers.jsonl", pack=True)
        stages = dict(
            answers=stage(1024, rows, 2e-4, max_seconds=60.0, accumulation=0, max_offset=offset)
        )
    config.update(
        target=target,
        save_every=0,
        accept_every=0,
        accept_rows=4,
        log_every=25,
        mesh=dict(data=-1, fsdp=1),
        optimizer=dict(warmup=0.05, floor=0.02),
        data=data,
        draft=draft,
        stages=stages,
    )
    return config


def small_llama(
    vocab_size: int, width: int, mlp_width: int, heads: int, *, kv_heads: int, positions: int
) -> dict[str, Any]:
    """The shape of a target to train from scratch: eight layers of Llama, tied embeddings."""
    return dict(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        model_width=width,
        mlp_width=mlp_width,
        num_layers=8,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=64,
        max_positions=positions,
        rope_theta=500000.0,
        tied_embeddings=True,
    )


def miniature(config: Any) -> None:
    """Turns a configuration with a corpus into the same path in seconds on a CPU."""
    config.dtype = "float32"
    config.accept_rows, config.accept_seq_len = 2, 64
    config.data.corpus.update(
        held_out=("attrs", "jinja2"),
        vocab_size=512,
        max_bytes=400_000,
        max_distribution_bytes=100_000,
        tokenizer_bytes=400_000,
    )
    if config.draft.kind in ("longspec", "parallel"):
        config.draft.window = 16
    sections = [config.stages]
    if config.get("pretraining"):
        config.pretraining.shape.update(
            vocab_size=512,
            model_width=32,
            mlp_width=48,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_width=16,
            max_positions=256,
        )
        sections.append(config.pretraining.stages)
    for stages in sections:
        for name, (seq_len, batch) in {"short": (32, 4), "long": (64, 2)}.items():
            if name in stages:
                stages[name].update(seq_len=seq_len, batch=batch, steps=3, max_seconds=0.0)
    if "short" in config.stages and config.stages.short.max_offset:
        config.stages.short.max_offset = 128


def paper_config(
    name: str,
    variant: str = "all",
    *,
    target: str,
    long_length: int,
    max_offset: int,
    sft_data: str = SFT_DATA,
    chat_turn: str = "",
    data: Mapping[str, Any] = {},
    seed: int = SEED,
) -> "ConfigDict":
    """The stages of the paper for a target.

    Args:
      name: of the configuration file; the variant of a stage looks for the draft of the one before
        in ``runs/NAME-STAGE/draft``.
      variant: ``all``, or one of ``short``, ``long`` and ``sft``; ``parallel`` for ``all`` with a
        parallel draft; or another kind of draft.
      target: hub id of the frozen target.
      long_length: tokens of a row in the last two stages.
      max_offset: largest anchor offset of the first stage.
      sft_data: hub data of the last stage.
      chat_turn: how the target's chat template writes a turn, for other kinds of drafts; as in its
        data if empty.
      data: what it says of all data, such as ``turn``.
      seed: of the rows and their order.
    """
    if variant not in (variants := ("all", *STAGES, "parallel", *KINDS)):
        known = ", ".join(variants)
        raise ValueError(f"{name} has no variant {variant!r}; choose one of {known}")
    config = base_config()
    config.update(target=target, data=data, seed=seed)
    if variant in KINDS:
        config.draft = dict(kind=variant)
        return KINDS[variant](config, chat_turn or config.to_dict()["data"]["turn"])
    stages = dict(
        short=stage(SHORT_LENGTH, 2048, 5e-4, max_offset=max_offset),
        long=stage(long_length, 256, 5e-6),
        sft=stage(long_length, 256, 5e-6),
    )
    sources = dict(
        short=dict(hub=SHORT_DATA),
        long=dict(hub=LONG_DATA),
        sft=dict(hub=sft_data, mask_prompts=True),
    )
    for each in stages.values():
        each.update(accumulation=0)
    # A step of a long stage takes minutes.
    if variant != "short":
        config.update(save_every=20, accept_every=20)
    if variant in ("all", "parallel"):
        for each, own in sources.items():
            stages[each].update(data={**config.to_dict()["data"], **own})
        config.update(stages=stages)
        if variant == "parallel":
            config.draft = dict(kind=variant)
        return config
    config.update(data=sources[variant], stages={variant: stages[variant]})
    if variant != "short":
        earlier = STAGES[STAGES.index(variant) - 1]
        config.update(draft=dict(init=f"runs/{name}-{earlier}/draft"))
    return config


def _on_chats(
    config: "ConfigDict", turn: str, *, clip: float, rate: float, epochs: int
) -> "ConfigDict":
    """A configuration that trains only on conversations."""
    config.update(
        data=_chats(turn),
        optimizer=dict(clip=clip, weight_decay=0.0, warmup=0.04),
        stages=dict(chat=stage(4096, 32, rate, accumulation=0, epochs=epochs)),
    )
    return config


def _on_text_and_chats(config: "ConfigDict", turn: str) -> "ConfigDict":
    """A configuration of a model that begins with nothing: full rows of text, then answers."""
    common = config.to_dict()["data"]
    text, chats = {**common, "hub": SHORT_DATA, "pack": True}, {**common, **_chats(turn)}
    config.update(
        stages=dict(
            text=stage(2048, 512, 1e-3, accumulation=0, data=text),
            chat=stage(4096, 32, 2e-4, accumulation=0, epochs=2, data=chats),
        )
    )
    return config


def _chats(turn: str) -> dict[str, Any]:
    """Conversations; only their answers are learned."""
    return dict(hub=CHAT_DATA, split=CHAT_SPLIT, turn=turn, mask_prompts=True, buckets=3)


KINDS: dict[str, Callable[["ConfigDict", str], "ConfigDict"]] = {
    "eagle3": partial(_on_chats, clip=0.5, rate=1e-4, epochs=2),
    "dflash": partial(_on_chats, clip=1.0, rate=6e-4, epochs=6),
    "small_lm": _on_text_and_chats,
}
"""How other kinds of drafts are trained, with the published numbers; each is a variant."""
