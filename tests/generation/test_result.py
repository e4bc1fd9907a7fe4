"""Results show themselves in one line."""

from dataclasses import replace

from longspec_jax.config.tree import TreeConfig
from longspec_jax.generation.memory import MemoryPlan
from longspec_jax.generation.result import GenerateResult, Stats, StreamRound, TreeUse
from longspec_jax.generation.text import Piece

STATS = Stats(
    prompt_tokens=(5000,),
    new_tokens=(101,),
    target_passes=(40,),
    histograms=((10, 10, 10, 10),),
    trees=(TreeUse("longspec", TreeConfig((1, 1, 1)), rounds=40, tokens=100, seconds=2.0),),
    prefill_seconds=1.0,
    decode_seconds=2.0,
    compile_seconds=0.0,
    draft_state_bytes=64,
    memory=MemoryPlan(1, 512, 1, 1, 1, 1, 1),
)


def result(*text: str | None, count: int = 101) -> GenerateResult:
    rows = len(text)
    return GenerateResult(((7,) * count,) * rows, text, ((True,) * count,) * rows, STATS)


def test_a_result_is_one_line() -> None:
    text = "    return 'a'\n\u2028" + "b" * 1000
    shown = repr(result(text))
    assert len(shown.splitlines()) == 1 and len(shown) < 140
    assert shown == (
        "GenerateResult(101 tokens, \"    return 'a'\\n\\u2028bbbbbbbbbbbbbbbbbbbbbbbb\"..., "
        "2.50 tokens per target pass, 50.0 tokens/s)"
    )


def test_a_batch_a_result_without_text_and_one_without_rounds() -> None:
    assert repr(result("a", "b", "c")).startswith("GenerateResult(3 rows, 303 tokens, 'a', ")
    assert repr(result(None)).startswith("GenerateResult(101 tokens, 2.50 tokens")
    ended = replace(STATS, new_tokens=(1,), target_passes=(0,))
    assert repr(replace(result("a", count=1), stats=ended)) == "GenerateResult(1 token, 'a')"


def test_a_round_is_one_line() -> None:
    pieces = ((Piece("ab", True), Piece("c\n", False)),)
    one = StreamRound(((7, 8),), ((True, False),), pieces, STATS)
    assert repr(one) == "StreamRound(2 tokens, 'abc\\n')"
    assert repr(replace(one, pieces=((),))) == "StreamRound(2 tokens)"
    assert len(repr(replace(one, pieces=((Piece("\n" * 500, True),),)))) < 140
