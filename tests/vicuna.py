"""A tokenizer in Vicuna's form: a small ``tokenizer.model`` of sentencepiece, and no other."""

import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

ROOT = Path(__file__).parents[1]


def save_sentences(folder: Path, pieces: int = 600) -> Any:
    """Train a tokenizer with Llama's settings on some documents, and write its files.

    Returns:
      What sentencepiece itself makes of the file.
    """
    lines = [line for file in sorted((ROOT / "docs").glob("*.md")) for line in file.open()]
    SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()][:2000]),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=pieces,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
        num_threads=1,
    )
    (folder / "tokenizer.vocab").unlink()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | names))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
