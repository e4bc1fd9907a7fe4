"""The JSON of a request's body, bounded by what the prompts of a server can need.

Python parses JSON without letting go of its interpreter lock: the event loop, and so every stream
and ``/health``, stands still meanwhile. Half a million numbers take a tenth of a second. So the
bytes are bounded before a body is read, and its values are counted before it is parsed. Nothing
here knows HTTP, the fields of requests or jax.
"""

import json
from typing import Any

from longspec_jax.checks import shown
from longspec_jax.weights.json_files import unique_keys

from .protocol import Refused

MOST_BYTES = 32 * 2**20
"""Of any body."""
PROMPTS = 64
"""Of a body, each as long as the context: as many as the queue holds."""
TOKEN_BYTES = 16
"""Of a token in a body. English has 4 to 5, a token id up to 8, and Chinese, whose characters a
client may write as ``\\u4e2d``, 6 to 12."""
OTHER_BYTES, OTHER_VALUES = 2**20, 2**17
"""Of all that is no prompt: the frame of messages, a JSON schema, biases."""
MOST_VALUES, MOST_STRINGS, MOST_CONTAINERS = 2**19, 2**18, OTHER_VALUES
"""Of a body: token ids beside those of one whole prompt, texts and names, and lists and objects."""
LONGEST_NUMBER = 100
"""Characters: Python reads a number in the time of their square."""
DEEPEST = 40
"""Objects and lists within each other; a JSON schema takes two for each level of its texts."""


def most_bytes(max_len: int) -> int:
    """The bytes of a body that a server of this context reads."""
    return min(MOST_BYTES, OTHER_BYTES + PROMPTS * TOKEN_BYTES * max_len)


def most_values(max_len: int) -> int:
    """The values of a body that a server of this context parses."""
    return OTHER_VALUES + max_len + min(MOST_VALUES, (PROMPTS - 1) * max_len)


def too_large(max_len: int) -> Refused:
    """The refusal of a body of too many bytes."""
    return Refused(
        f"the body has more than {most_bytes(max_len)} bytes, which are {TOKEN_BYTES} for each "
        f"token of {PROMPTS} prompts of {max_len} tokens, {OTHER_BYTES} for the rest, and at most "
        f"{MOST_BYTES}; send less: fewer prompts, or shorter ones",
        status=413,
    )


def read_json(body: bytes | bytearray, max_len: int) -> dict[str, Any]:
    """The object that a body holds.

    Args:
      max_len: most tokens of a prompt and its answer.

    Raises:
      Refused: for anything else, and for an object that is too large or nested too deeply.
    """
    if len(body) > most_bytes(max_len):
        raise too_large(max_len)
    if len(body) > OTHER_VALUES:  # A smaller one cannot hold too many values.
        _check_values(body, most_values(max_len))
    try:
        # JSON is UTF-8. Python would also take UTF-16, in which values are not counted.
        text = body.decode("utf-8")
        found = json.loads(
            text,
            parse_int=_whole,
            parse_float=_real,
            parse_constant=_no_constant,
            object_pairs_hook=unique_keys,
        )
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # UnicodeDecodeError is one, and a number of too many digits, too.
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(f"the body must be a JSON object, got {shown(found)}")
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return found
    raise _too_deep()


def _check_values(body: bytes | bytearray, most: int) -> None:
    """Refuse a body of too many values, by its commas and brackets outside of texts.

    What is no JSON is counted somehow: the parser ends where it stops being JSON.
    """
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    strings, containers, values = bare.count(b'"') // 2, 0, 0
    if strings <= MOST_STRINGS:
        outside = b"".join(bare.split(b'"')[::2])
        containers = outside.count(b"[") + outside.count(b"{")
        values = containers + outside.count(b",")
    for count, limit, name in (
        (strings, MOST_STRINGS, "texts and names"),
        (containers, MOST_CONTAINERS, "lists and objects"),
        (values, most, "values"),
    ):
        if count > limit:
            raise Refused(
                f"the body has {count} {name}, and a request may have {limit}; send fewer prompts, "
                "messages or parts in each",
                status=413,
            )


def _too_deep() -> Refused:
    return Refused(f"the body is nested more than {DEEPEST} levels deep; flatten it")


def _whole(digits: str) -> int:
    return int(_short(digits))


def _real(digits: str) -> float:
    return float(_short(digits))


def _short(digits: str) -> str:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number has more than {LONGEST_NUMBER} characters")
    return digits


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
