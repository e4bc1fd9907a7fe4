"""Stop strings: where a text ends, what is held back, and rows that end there in every call."""

import dataclasses
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StopStringCriteria

from longspec_jax.decoding.slots import StepOutput, until
from longspec_jax.generation.inputs import read_batch
from longspec_jax.generation.options import given_option
from longspec_jax.generation.stops import StopStrings, stop_strings
from longspec_jax.generation.text import RowText, continuation
from tests.generation.test_text import Counting, byte_fallback, byte_level, random_tokens
from tests.infer.toys import STOP, toy_spec, toy_tokenizer
from tests.kit import each_row

PROMPTS = ["ab cd gh é", "cd", "é ab ab gh cd"]
OPTIONS: dict[str, Any] = dict(
    max_new_tokens=40, temperature=1.0, seed=[3, 4, 5], eos_token_id=[], tree=(3, 4)
)


def first_match(text: str, strings: list[str]) -> tuple[int, int] | None:
    """End and length of the stop string that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        if lengths := [len(one) for one in strings if text[:end].endswith(one)]:
            return end, max(lengths)
    return None


def may_begin(text: str, strings: list[str]) -> int:
    """The length of the longest end of a text with which a stop string begins."""
    beginnings = {one[:size] for one in strings for size in range(len(one))}
    return max(size for size in range(len(text) + 1) if text[len(text) - size :] in beginnings)


def split(text: str, choose: random.Random) -> list[str]:
    cuts = sorted(choose.choices(range(len(text) + 1), k=choose.randrange(6)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_a_match_is_that_of_a_naive_search_however_the_text_is_split() -> None:
    choose, matches = random.Random(0), 0
    for _ in range(4000):
        strings = ["".join(choose.choices("ab", k=choose.randrange(1, 6))) for _ in range(3)]
        strings = strings[: choose.randrange(1, 4)]
        text = "".join(choose.choices("abc", weights=[4, 4, 1], k=choose.randrange(1, 14)))
        search, state, before = StopStrings(strings), 0, ""
        expected = first_match(text, strings)
        for part in split(text, choose):
            state, match = search.read(state, part)
            if match is not None:
                assert (len(before) + match.end, match.length) == expected, (text, strings)
                matches += 1
                break
            before += part
            assert search.held(state) == may_begin(before, strings), (before, strings)
        else:
            assert expected is None, (text, strings)
    assert 1000 < matches < 3900


@each_row("tokenizer", [byte_fallback, byte_level])
def test_a_row_ends_with_the_first_token_whose_text_holds_a_stop_string(tokenizer) -> None:
    """Also inside a character's bytes, a run of bytes and a token; nothing is shown too early."""
    tokenizer, choose, stopped = tokenizer(), random.Random(1), 0
    for _ in range(500):
        tokens = random_tokens(tokenizer, choose)
        whole = continuation(tokenizer, [3], tokens)
        clean = choose.choice(re.findall("[^\ufffd]+", whole) or ["b"])
        begin = choose.randrange(len(clean))
        strings = [clean[begin : begin + choose.randrange(1, 4)], choose.choice(["饕b", "\n"])]
        texts = [continuation(tokenizer, [3], tokens[:end]) for end in range(1, len(tokens) + 1)]
        ends = [end for end, text in enumerate(texts, 1) if any(one in text for one in strings)]
        row, shown, taken = RowText(tokenizer, [3], strings), "", 0
        for index, token in enumerate(tokens):
            added = row.add([token], [index % 2 > 0], index + 1 == len(tokens))
            shown += "".join(piece.text for piece in added.pieces)
            taken += added.kept
            if row.stopped:
                break
            assert texts[index].startswith(shown) or "\ufffd" in texts[index]
        assert row.stopped == bool(ends) and taken == (ends[0] if ends else len(tokens))
        stopped += row.stopped
        match = first_match(texts[taken - 1], strings)
        assert shown == (whole if match is None else texts[taken - 1][: match[0] - match[1]])
        row, at_once = RowText(tokenizer, [3], strings), ""
        added = row.add(tokens, [False] * len(tokens), True)
        at_once = "".join(piece.text for piece in added.pieces)
        assert (at_once, added.kept, row.stopped) == (shown, taken, bool(ends))
    assert 100 < stopped < 490


def test_text_is_held_back_with_its_colour() -> None:
    row = RowText(toy_tokenizer(), (), ["abc", "bd"])
    a, b, c, d, f = (toy_tokenizer()(one)["input_ids"][0] for one in "abcdf")
    assert row.add([a, b], [True, False], False).pieces == ()
    assert row.add([a], [False], False).pieces == (("a", True, a), ("b", False, b))
    assert row.add([f], [True], False).pieces == (("a", False, a), ("f", True, f))
    assert row.add([a, b, c, d], [True] * 4, False) == (3, ()) and row.stopped


def test_the_name_of_a_special_token_is_met_with_the_token() -> None:
    a, b = toy_tokenizer()("ab")["input_ids"]
    row = RowText(toy_tokenizer(), (), ["<end>", "abc"])
    silent = ("", False, STOP)
    found = ("a", False, a), ("b", False, b), silent
    assert row.add([a, b, STOP, a], [False] * 4, False) == (3, found)
    assert row.stopped


def test_a_line_feed_in_bytes_is_met_at_once_and_a_long_run_when_it_ends() -> None:
    """Llama-2 has no token of its own for a line feed."""
    tokenizer = byte_fallback()
    feed, a = (tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in b"\na")
    row = RowText(tokenizer, [3], ["\n\n"])
    assert row.add([3, feed, feed, 3], [False] * 4, False) == (
        3,
        (("b", False, 3), *[("", False, feed)] * 2),
    )
    row = RowText(tokenizer, [3], ["\n"])
    assert row.add([a] * 80 + [feed, 3], [False] * 82, False).kept == 82 and row.stopped


def test_the_time_is_linear_in_a_run_of_bytes_and_in_held_text() -> None:
    counting, byte = Counting(byte_fallback()), byte_fallback().convert_tokens_to_ids("<0x61>")
    row = RowText(counting, [3], ["a" * 900 + "b", "x"])
    for _ in range(4000):
        row.add([byte], [False], False)
    assert counting.decoded < 4000 * 20
    for _ in range(2000):
        row.add([3], [False], False)
    assert not row.stopped or counting.decoded < 6000 * 25


def test_what_is_left_of_a_step() -> None:
    tokens, drafted = tuple(range(9)), tuple(map(bool, (1, 1, 0, 0, 1, 1, 1, 0, 1)))
    output = StepOutput(7, tokens, drafted, (2, 0, 3, 1), None)
    for kept, rounds in {1: (1,), 3: (2,), 4: (2, 0), 6: (2, 0, 2), 9: (2, 0, 3, 1)}.items():
        left = until(output, kept)
        assert left.rounds == rounds and left.finish == "stop" and left.id == 7
        assert left.tokens == tuple(range(kept)) and len(left.drafted) == kept
    assert until(StepOutput(0, tokens[:1], drafted[:1], ()), 1).rounds == ()


def by_transformers(tokens: tuple[int, ...], strings: list[str]) -> tuple[int, ...]:
    """The tokens up to the first with which transformers' own criterion would stop."""
    criteria = StopStringCriteria(toy_tokenizer(), strings)
    for end in range(1, len(tokens) + 1):
        if criteria(torch.tensor([tokens[:end]]), None)[0]:
            return tokens[:end]
    return tokens


def chosen_stops(texts: Any) -> list[list[str]]:
    """Of every text two characters from its midst, and a string that is not in it."""
    return [[re.findall("[a-h ]{2}", text[5:])[0], "zz"] for text in texts]


@pytest.fixture(scope="module")
def whole() -> Any:
    # Followed round by round, as calls with stop strings are: the same programs.
    return toy_spec().generate(PROMPTS, **OPTIONS, on_round=lambda added: None)


def test_every_call_ends_rows_where_transformers_does(whole) -> None:
    """Speculative, plain, streamed and through fewer slots; text, tokens and counts agree."""
    spec, stops = toy_spec(), chosen_stops(whole.text)
    result = spec.generate(PROMPTS, **OPTIONS, stop_strings=stops)
    assert result.sequences == tuple(map(by_transformers, whole.sequences, stops))
    assert all(len(row) < 40 for row in result.sequences)
    for text, full, (string, _) in zip(result.text, whole.text, stops, strict=True):
        assert text == full[: full.index(string)]
    stats = result.stats
    assert stats.new_tokens == tuple(map(len, result.sequences)) < whole.stats.new_tokens
    for row, histogram in enumerate(stats.histograms):
        accepted = sum(depth * rounds for depth, rounds in enumerate(histogram))
        assert accepted == sum(result.drafted[row])
        assert stats.target_passes[row] <= whole.stats.target_passes[row]
    compared = spec.compare(PROMPTS, **OPTIONS, stop_strings=stops)
    assert compared.identical and compared.speculative.sequences == result.sequences
    assert compared.plain.text == result.text
    rounds = list(spec.stream(PROMPTS, **OPTIONS, stop_strings=stops))
    assert tuple("".join(one.text[row] for one in rounds) for row in range(3)) == result.text
    assert rounds[-1].stats.histograms == stats.histograms
    config = GenerationConfig(stop_strings=stops[0])
    found = spec.generate(PROMPTS, config, **OPTIONS, tokenizer=toy_tokenizer())
    assert found.sequences[0] == result.sequences[0] and found.text[0] == result.text[0]


def test_the_first_token_can_complete_a_stop_string(whole) -> None:
    firsts = [toy_tokenizer().decode(row[:1]) for row in whole.sequences]
    [ended, *_] = [row for row, text in enumerate(firsts) if text != "\ufffd"]
    stops = [[text] if row == ended else [] for row, text in enumerate(firsts)]
    result = toy_spec().generate(PROMPTS, **OPTIONS, stop_strings=stops)
    for row, text in enumerate(result.text):
        assert text == ("" if row == ended else whole.text[row])
    assert result.stats.new_tokens[ended] == 1 and result.stats.target_passes[ended] == 0


def test_several_sequences_of_a_prompt(whole) -> None:
    spec, options = toy_spec(), {**OPTIONS, "stop_strings": ["zz", "yy"]}
    result = spec.generate(PROMPTS[0], **{**options, "seed": 4}, num_return_sequences=3)
    alone = spec.generate([PROMPTS[0]] * 3, **{**options, "seed": [4, 5, 6]})
    assert result.sequences == alone.sequences and result.text == alone.text
    assert len(set(result.sequences)) == 3
    twice = dict(num_return_sequences=2, do_sample=True)
    given: Any = dict(seed=[3, 2**32 - 1], temperature=1, stop_strings=[["b"], []])
    batch = read_batch(spec, ["ab", "cd"], GenerationConfig(**twice), given)
    assert [row.tolist() for row in batch.prompts] == [[1, 2]] * 2 + [[3, 4]] * 2
    assert batch.request.sampling.seed.tolist() == [3, 4, 2**32 - 1, 0]
    assert batch.stop_strings == (("b",), ("b",), (), ())


@each_row(
    ("options", "message"),
    [
        (dict(stop_strings=""), "stop_strings holds an empty text, which would end every row"),
        (dict(stop_strings=b"a"), "stop_strings=b'a' must be text, a list of texts, or"),
        (dict(stop_strings=["a", 3]), r"stop_strings=\['a', 3\] must be text"),
        (dict(stop_strings=[["a"], [3]]), r"stop_strings=\[3\] must be text"),
        (dict(stop_strings=[["a"]]), "stop_strings has 1 lists for 2 prompts"),
        (dict(stop_strings=["a" * 5000]), "1 texts of 5000 characters together; a row may have 64"),
        (dict(stop_strings=list(map(str, range(65)))), "stop_strings holds 65 texts"),
        (dict(num_return_sequences=0, temperature=1), "num_return_sequences=0 must be a whole"),
        (dict(num_return_sequences=2), "num_return_sequences=2 gives equal rows at temperature 0"),
    ],
)
def test_refusals(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        toy_spec().check(["ab", "cd"], **options)


def test_stop_strings_need_a_tokenizer_and_the_call_wins() -> None:
    spec = dataclasses.replace(toy_spec(), tokenizer=None)
    with pytest.raises(ValueError, match="without a tokenizer there is none"):
        spec.check([[1, 2]], stop_strings="a")
    config = SimpleNamespace(stop_strings=["a", "a"])
    name = "stop_strings"
    assert stop_strings(given_option({}, config, name), 2) == (("a",),) * 2
    for given, expected in (([], ((),)), ({"b"}, (("b",),))):
        assert stop_strings(given_option({name: given}, config, name), 1) == expected
