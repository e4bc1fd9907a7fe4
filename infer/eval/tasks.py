"""The tasks: where their samples come from, how they ask, and how long the answers may be.

Wordings and numbers of new tokens are those that the protocols publish: LongBench's configuration
(github.com/THUDM/LongBench, ``dataset2prompt.json`` and ``dataset2maxlen.json``) and the evaluation
script of the LongSpec release, which uses LongBench's questions but for the two tasks about code.
Where neither has a wording (BookSum), it is this project's own.
"""

from dataclasses import dataclass

from .samples import Wording

RELEASE_TOKENS = 1024
"""New tokens of every task in the LongSpec release."""
SUMMARY_TOKENS, CODE_TOKENS = 512, 64
"""New tokens in LongBench."""
AIME_TOKENS = 32768
"""New tokens of a problem in the LongSpec paper."""
EXTENDED_TOKENS = 256
"""New tokens on books in SpecExtend (arXiv:2505.20776, appendix D)."""


@dataclass(frozen=True)
class Hub:
    """Where a task's data lie on the hub."""

    dataset: str
    split: str = "test"
    config: str | None = None
    archive: str | None = None
    """A zip file in the dataset that holds ``TASK.jsonl``, for data behind a dataset script."""


@dataclass(frozen=True)
class Task:
    """A task whose samples are rows of a file."""

    fields: tuple[str, ...]
    """Of a row, that the wordings are filled with."""
    answers: str
    """The field of a row that holds what counts as an answer."""
    hub: Hub
    release: Wording
    """How the LongSpec release asks."""
    longbench: Wording
    """How LongBench asks."""
    release_tokens: int = RELEASE_TOKENS
    longbench_tokens: int = SUMMARY_TOKENS
    chat: bool = True
    """Whether LongBench asks in the model's chat format; code is completed as it stands."""
    long: bool = True
    """Whether the release's bounds on the length of prompts hold."""
    books: bool = False
    """Whether a text is cut to ``--context`` tokens, as papers do that report by input length."""
    metric: str | None = None
    """Key of :data:`infer.eval.scores.METRICS`."""


LONGBENCH = Hub("THUDM/LongBench", archive="data.zip")
COMPLETE = "Please complete the code given below. \n{context}"
SUMMARY = Wording(
    "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
    "Report:\n{context}\n\nNow, write a one-page summary of the report.",
    "Summary:",
)
ANSWER = Wording(
    "You are given a meeting transcript and a query containing a question or instruction. Answer "
    "the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based "
    "on the above meeting transcript in one or more sentences.\n\nQuery: {input}",
    "Answer:",
    between="\n",
)
NEWS = Wording(
    "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
    "{context}\n\nNow, write a one-page summary of all the news.",
    "Summary:",
)
RELEASE_CODE = Wording(COMPLETE + "Now, complete the code given.")
PROBLEM = Wording("{problem}")
BOOK = Wording("{text}")
CHAPTER = Wording(
    "You are given a part of a book. Write a summary of it.\n\nBook:\n{text}\n\nNow, write a "
    "summary of this part of the book.",
    "Summary:",
)

TASKS = {
    "gov_report": Task(("context",), "answers", LONGBENCH, SUMMARY, SUMMARY, metric="rouge_l"),
    "qmsum": Task(("context", "input"), "answers", LONGBENCH, ANSWER, ANSWER, metric="rouge_l"),
    "multi_news": Task(("context",), "answers", LONGBENCH, NEWS, NEWS, metric="rouge_l"),
    "lcc": Task(
        *(("context",), "answers", LONGBENCH),
        *(RELEASE_CODE, Wording(COMPLETE + "Next line of code:\n")),
        longbench_tokens=CODE_TOKENS,
        chat=False,
        metric="edit_similarity",
    ),
    "repobench-p": Task(
        *(("context", "input"), "answers", LONGBENCH),
        # The release leaves out the input, the beginning of the file to complete.
        *(RELEASE_CODE, Wording(COMPLETE + "{input}Next line of code:\n")),
        longbench_tokens=CODE_TOKENS,
        chat=False,
        metric="edit_similarity",
    ),
    "aime24": Task(
        *(("problem",), "answer", Hub("AI-MO/aimo-validation-aime", split="train")),
        *(PROBLEM, PROBLEM),
        release_tokens=AIME_TOKENS,
        longbench_tokens=AIME_TOKENS,
        long=False,
        metric="exact_match",
    ),
    "pg19": Task(
        *(("text",), "", Hub("emozilla/pg19-test"), BOOK, BOOK),
        release_tokens=EXTENDED_TOKENS,
        longbench_tokens=EXTENDED_TOKENS,
        chat=False,
        long=False,
        books=True,
    ),
    "booksum": Task(
        *(("text",), "summary", Hub("ubaada/booksum-complete-cleaned", config="books")),
        *(CHAPTER, CHAPTER),
        release_tokens=EXTENDED_TOKENS,
        longbench_tokens=EXTENDED_TOKENS,
        long=False,
        books=True,
        metric="rouge_l",
    ),
}
"""Tasks of rows, by the names that papers give them."""
AIME24_ROWS = range(60, 90)
"""The problems of 2024 among those of three years, by their ``id``."""
FREE = "jsonl"
"""The task whose prompts a user's file holds."""
NEEDLE = "needle"
"""A code hidden in a long document."""
DEMO_SUITE = "demo"
"""Stands for all tasks that are made of the documents that come with the package."""
