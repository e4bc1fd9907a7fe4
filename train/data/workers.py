"""Documents to tokens by several processes, in the order and with the result of one.

A process looks up, parses and tokenises documents by itself; only their numbers go to it and only
tokens come back. Documents of a stream, which has no numbers, are handed to it.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..config import DataConfig
from .encoded import EncodedTurn, encode
from .formats import Turn
from .loading import Documents
from .streaming import Stream
from .tokenizer import load_tokenizer

SHARE = 256
"""Documents a worker is given at a time."""


@dataclass(frozen=True)
class Work:
    """What a worker needs to know."""

    documents: Documents | Stream
    tokenizer: str
    """Folder or hub id."""
    revision: str | None
    data: DataConfig


def encode_by_workers(work: Work, workers: int) -> Iterator[list[EncodedTurn]]:
    """The tokens of all documents, in their order.

    Raises:
      ChildProcessError: if a worker is ended from outside.
    """
    # Forking a process with jax's threads is not safe.
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawned, _begin, (work,)) as pool:
        waiting: deque[Future[list[list[EncodedTurn]]]] = deque()
        try:
            for share in _shares(work.documents):
                waiting.append(pool.submit(_encode_share, share))
                if len(waiting) > 4 * workers:  # What is made is written before more is.
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"one of {workers} workers was ended from outside, perhaps because memory ran out; "
                "try fewer --workers"
            ) from error


_own: dict[str, Any] = {}
"""What a worker keeps between shares."""


def _begin(work: Work) -> None:
    """Make a process a worker."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # The processes share the cores.
    _own.update(work=work, tokenizer=load_tokenizer(work.tokenizer, work.revision))


def _shares(documents: Documents | Stream) -> Iterator[range | list[list[Turn]]]:
    """What a worker is given at a time: the numbers of documents, or documents."""
    if isinstance(documents, Stream):
        rest = iter(documents)
        while share := list(islice(rest, SHARE)):
            yield share
        return
    for start in range(0, len(documents), SHARE):
        yield range(start, min(start + SHARE, len(documents)))


def _encode_share(share: range | list[list[Turn]]) -> list[list[EncodedTurn]]:
    """Tokens of some documents."""
    work: Work = _own["work"]
    known: Any = work.documents
    documents = (known[index] for index in share) if isinstance(share, range) else share
    return list(encode(documents, _own["tokenizer"], work.data))
