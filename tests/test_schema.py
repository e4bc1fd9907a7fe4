"""Declared options: what is read from a declaration, and what every reader makes of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from longspec_jax import cli
from longspec_jax.checks import Each, Maybe, OneOf, Real, Refused, Rule, Text, Truth, Whole
from longspec_jax.config import loading, sampling, serving
from longspec_jax.schema import RENAMED, REQUIRED, Option, build, options, read, rule_of
from tests.kit import each_row
from tests.refusals import edges, wrong

DECLARED = {**sampling.OPTIONS, **loading.OPTIONS, **serving.OPTIONS}
KINDS = serving.EngineOptions, loading.LoadOptions
RULES: list[Rule] = [
    Whole(2, 9, " (2 is few)"),
    Real(0.0, 1.0),
    Real(0.0, 1.0, includes_least=False),
    Truth(),
    Text(1, 4),
    OneOf(("fast", "slow")),
    Each(Whole(0, 5), 1, 3),
    Maybe(Whole()),
]


@each_row("name", DECLARED)
def test_an_option_has_a_sentence_and_a_default_that_it_takes(name: str) -> None:
    option = DECLARED[name]
    assert option.about and not option.about.endswith(".") and option.about[0].islower()
    assert option.default in (None, REQUIRED) or option.rule.refusal(option.default) is None


def test_an_option_under_its_old_name_is_refused_with_the_new_one() -> None:
    """In Python and as a flag."""
    parser = cli.Parser()
    cli.add_options(parser, serving.OPTIONS)
    cli.add_options(parser, {"batch_invariant": loading.OPTIONS["batch_invariant"]})
    parser.add_argument("--gpu_memory_utilization")
    for old, new in RENAMED.items():
        with pytest.raises(ValueError, match=f"option --{old} is --{new} now"):
            parser.parse_args([f"--{old}=1"])
        kind = next((each for each in KINDS if new in options(each)), None)
        if kind is not None:
            with pytest.raises(TypeError, match=f"option {old} is {new} now"):
                read(kind, {old: 1}, "a call")
    with pytest.raises(ValueError, match="option --no-same_bits is --no-batch_invariant now"):
        parser.parse_args(["--no-same_bits"])


@each_row("rule", RULES)
def test_a_rule_takes_its_edges_and_refuses_the_rest(rule: Rule) -> None:
    for value in edges(rule):
        assert rule.read("x", value) == value
    for value in wrong(rule):
        with pytest.raises(Refused, match="^x=.* must be ") as error:
            rule.read("x", value, row=3)
        assert " of row 3 must be " in str(error.value) and error.value.name == "x"


def test_values_are_read_from_text_and_json() -> None:
    """As Python's own types: nothing is rounded or cast but what stands for the same number."""
    assert [Whole().of_text(text) for text in (" 7 ", "7.0", "1_0")] == [7, "7.0", "1_0"]
    assert Real(0, 9).of_text("2") == 2.0 and Truth().of_text("True") is True
    assert Whole().read_json("x", 4.0) == 4 and type(Each(Whole()).read_json("x", [4.0])[0]) is int
    assert type(Real(0, 9).read("x", 2)) is float
    with pytest.raises(Refused):
        Whole().read_json("x", 4.5)
    with pytest.raises(Refused):
        Whole().read("x", 4.0)


@dataclass(frozen=True)
class Part:
    """A section within another."""

    size: Annotated[int, Whole(1), "how large it is"]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) > self.size:
            raise ValueError(f"{len(self.names)} names for size={self.size}")


@dataclass(frozen=True)
class Group:
    """A group of options."""

    part: Part
    rest: tuple[Part, ...] = ()
    other: Part | None = None
    share: float = 0.5


def test_a_declaration_is_read_by_names_in_order() -> None:
    found = options(Group)
    assert [*found] == ["part", "rest", "other", "share"]
    assert found["part"].default is REQUIRED and found["share"].default == 0.5
    assert options(Part)["size"] == Option(Whole(1), REQUIRED, "how large it is")
    with pytest.raises(TypeError, match="has no rule; annotate it"):
        rule_of(set[int])


def test_sections_are_built_from_mappings() -> None:
    part = {"size": 2, "names": ["a"]}
    built = build(Group, {"part": part, "rest": [part, part], "share": 1}, "--x.")
    assert built == Group(Part(2, ("a",)), (Part(2, ("a",)),) * 2, None, 1.0)
    assert hash(built) and build(Group, {"part": built.part}, "--x.").part is built.part


@each_row(
    ("values", "message"),
    [
        ({}, "^--x lacks part; give every one a value$"),
        ({"part": 3}, "^--x.part=3 must be a section with fields of its own$"),
        ({"part": {"size": 0}}, "^--x.part.size=0 must be a whole number from 1"),
        ({"part": {"size": 1, "nmaes": ()}}, "^--x.part: unknown option 'nmaes'; did you mean 'na"),
        ({"part": {"size": 1, "names": "a"}}, "^--x.part.names='a' must be a list$"),
        ({"part": {"size": 1, "names": [1]}}, r"^--x.part.names\[0\]=1 must be text$"),
        ({"part": {"size": 1, "names": ["a", "b"]}}, "^--x.part: 2 names for size=1$"),
        ({"part": {"size": 1}, "rest": [{"size": None}]}, r"^--x.rest\[0\].size=None must be a wh"),
        ({"part": {"size": 1}, "zzz": 1}, "^--x: unknown option 'zzz'; known are part, rest"),
    ],
)
def test_a_refusal_has_the_path_of_its_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(Group, values, "--x.")


def test_pydantic_reads_an_option_as_its_rule_does() -> None:
    """With the same bounds, words and sentence; so request fields are no second list."""
    pydantic = pytest.importorskip("pydantic")
    names = (*sampling.NUMBERS, "eos_token_id", "stop_strings")
    fields: Any = {name: (Annotated[Any, DECLARED[name]] | None, None) for name in names}
    model = pydantic.create_model("Request", **fields)
    for name in names:
        rule = DECLARED[name].rule
        described = model.model_json_schema()["properties"][name]["anyOf"][0]
        assert described == {**rule.json_schema, "description": DECLARED[name].about}
        for value in edges(rule):
            assert getattr(model(**{name: value}), name) == value
        for value in wrong(rule):
            if value is None or rule.refusal(rule.of_json(value)) is None:
                continue
            with pytest.raises(pydantic.ValidationError) as error:
                model(**{name: value})
            assert error.value.errors()[0]["loc"] == (name,)
            assert str(error.value.errors()[0]["ctx"]["error"]).startswith("must be ")


def test_the_pages_name_every_generation_option() -> None:
    pages = (Path(__file__).parents[1] / "docs").rglob("*.md")
    text = "".join(page.read_text() for page in pages)
    assert not [name for name in sampling.OPTIONS if f"`{name}" not in text]
