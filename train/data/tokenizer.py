"""A small byte-level BPE tokenizer, trained on a corpus and saved in Hugging Face format."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from longspec_jax import loading

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
"""Special tokens, with ids 0, 1 and 2."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (any text round-trips) that begins every text with BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,  # Longer ones would be licence headers learned by heart.
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The tokenizer of a Hugging Face folder or hub id."""
    tokenizer = loading.load_tokenizer(source, revision)
    if tokenizer is None:
        raise ValueError(
            f"{source} comes without a tokenizer; put tokenizer.json and tokenizer_config.json "
            "beside the model"
        )
    return tokenizer


def encode_documents(
    tokenizer: Any, texts: Iterable[str], batch: int = 256
) -> Iterator[np.ndarray]:
    """Token ids of every text, with the tokenizer's own BOS in front and EOS behind."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = iter(texts)
    while chunk := list(islice(texts, batch)):
        for ids in encode_texts(tokenizer, chunk):
            ids = ids[:-1] if end and ids and ids[-1] == end[0] else ids
            yield np.asarray(ids + end, np.uint32)


def encode_texts(tokenizer: Any, texts: list[str]) -> Iterator[list[int]]:
    """Ids of every text; a fast tokenizer's backend does it in parallel and without offsets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield from tokenizer(texts)["input_ids"]
    else:
        yield from (encoding.ids for encoding in backend.encode_batch_fast(texts))
