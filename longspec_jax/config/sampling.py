"""The generation options: what a call, a flag, a request and a line of a batch may choose.

Each is declared here, and nowhere else. Commands take their flags and their defaults from
:data:`OPTIONS`, the server the rules of its fields, files of prompts their keys, tests the values
that must be refused.

To add one: an entry of :class:`GenerateOptions`, what it does in
:func:`longspec_jax.generation.options.resolve`, and its name in :data:`FILTERS`, :data:`PENALTIES`
or :data:`NUMBERS` if it is a number that commands take. A page of docs names it, which a test
checks.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from longspec_jax.checks import (
    LARGEST_FLOAT32,
    LARGEST_NUMBER,
    Each,
    Real,
    Text,
    That,
    Truth,
    Whole,
)
from longspec_jax.config.tree import TreeConfig
from longspec_jax.schema import Option, options

MOST_ALTERNATIVES = 20
"""Most tokens besides the drawn one whose log-probabilities a call may ask for."""
TOKEN = Whole(0)
"""A token id; the size of the vocabulary is checked where the target is known."""
BIAS = Real(-100.0, 100.0, "a number from -100 to 100")
ALTERNATIVES = Whole(0, MOST_ALTERNATIVES, " (None for no log-probabilities)")


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``stream``.

    Each is one value, or a list with one for every row; ``do_sample`` and ``num_return_sequences``
    are one value.

    Options of transformers that have no effect here are accepted too: ``use_cache=True``,
    ``num_beams=1``, ``pad_token_id`` and others. ``max_length`` limits prompt and new tokens
    together.
    """

    max_new_tokens: Annotated[int | Sequence[int], Option(Whole(1), 256, "most tokens to generate")]
    do_sample: Annotated[
        bool,
        Option(Truth(), None, "false draws the most likely token; if absent, temperature decides"),
    ]
    temperature: Annotated[
        float | Sequence[float],
        Option(
            Real(0.0, LARGEST_FLOAT32, ">= 0 (0 is greedy) and finite"),
            0.0,
            "divides the logits; 0 draws the most likely token",
        ),
    ]
    top_k: Annotated[
        int | Sequence[int],
        Option(
            Whole(0, note=" (0 keeps all tokens)"),
            0,
            "draw from this many most probable tokens; 0: all",
        ),
    ]
    top_p: Annotated[
        float | Sequence[float],
        Option(
            Real(0.0, 1.0, "in (0, 1] (1 keeps all tokens)", includes_least=False),
            1.0,
            "draw from the most probable tokens that together have this share; 1: all",
        ),
    ]
    min_p: Annotated[
        float | Sequence[float],
        Option(
            Real(0.0, 1.0, "in [0, 1] (0 keeps all tokens)"),
            0.0,
            "least probability of a drawn token, as a share of the most likely token's; 0: all",
        ),
    ]
    logit_bias: Annotated[
        Mapping[int, float] | Sequence[Mapping[int, float]],
        Option(
            That(lambda value: isinstance(value, Mapping), "a mapping of token ids to numbers"),
            None,
            "added to the logits of tokens, by id, before penalties and temperature, from -100 to "
            "100",
        ),
    ]
    repetition_penalty: Annotated[
        float | Sequence[float],
        Option(
            # It divides and multiplies logits, which must stay finite.
            Real(1 / LARGEST_NUMBER, LARGEST_NUMBER, "above 0 (1 is none), from 1e-30 to 1e30"),
            1.0,
            "divides positive logits of tokens in prompt and text, multiplies negative ones; 1: "
            "none",
        ),
    ]
    presence_penalty: Annotated[
        float | Sequence[float],
        Option(
            Real(-2.0, 2.0, "from -2 to 2 (0 is none)"),
            0.0,
            "subtracted from the logits of tokens in the text so far; 0: none",
        ),
    ]
    frequency_penalty: Annotated[
        float | Sequence[float],
        Option(
            Real(-2.0, 2.0, "from -2 to 2 (0 is none)"),
            0.0,
            "subtracted for each time that a token is in the text so far; 0: none",
        ),
    ]
    logprobs: Annotated[
        int | Sequence[int | None],
        Option(
            ALTERNATIVES,
            None,
            "report the log-probability of every token and of this number of the most likely "
            "ones, before biases, penalties, temperature and filters; none if absent",
        ),
    ]
    prompt_logprobs: Annotated[
        bool | int | Sequence[bool | int],
        Option(ALTERNATIVES, None, "the same of the prompt's tokens; true for only their own"),
    ]
    seed: Annotated[
        int | Sequence[int],
        Option(Whole(0, 2**32 - 1), 0, "of the draws; rows of one seed draw alike"),
    ]
    eos_token_id: Annotated[
        int | Sequence[int] | Sequence[Sequence[int]],
        Option(Each(TOKEN), None, "tokens that end a row; the model's own if absent, [] for none"),
    ]
    stop_strings: Annotated[
        str | Sequence[str] | Sequence[Sequence[str]],
        Option(
            Each(Text(1)),
            None,
            "texts that end a row, besides the stop tokens; its text ends before them",
        ),
    ]
    num_return_sequences: Annotated[
        int, Option(Whole(1), 1, "rows of every prompt, the i-th with seed + i")
    ]


class CallOptions(GenerateOptions, total=False):
    """What else every call takes."""

    tree: TreeConfig | Sequence[int] | str | None
    """Shape of the trees, ``PLAIN`` for plain decoding; the object's own if absent. Without one the
    fastest on this machine runs, which lookup joins: a few are tried as calls run, and what they
    emit in a second is remembered (:mod:`longspec_jax.generation.speeds`)."""
    chat_template: str | None
    """A Jinja template for messages instead of the tokenizer's own."""


OPTIONS: Mapping[str, Option] = options(GenerateOptions)
FILTERS = ("top_k", "top_p", "min_p")
"""What leaves out tokens of a draw; at their defaults, none."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""What moves logits of tokens that are there already; at their defaults, none."""
NUMBERS = ("max_new_tokens", "temperature", *FILTERS, *PENALTIES, "seed")
"""Options of one number: those that commands take as flags, and rows of a batch for themselves."""


def rule(name: str) -> Whole | Real:
    """What an option of one number may be, of one row."""
    found = OPTIONS[name].rule
    assert isinstance(found, Whole | Real), name
    return found


def neutral(names: Sequence[str]) -> dict[str, Any]:
    """Options at their defaults."""
    return {name: OPTIONS[name].default for name in names}
