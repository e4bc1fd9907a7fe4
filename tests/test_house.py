"""What the tree may cost its reader: a table of ceilings, and what is measured against it.

A change that lowers a figure lowers its ceiling. With a ceiling of 0 the test prints the figure. A
ceiling is raised only with a reason in the commit message.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

from longspec_jax import LongSpec
from longspec_jax.config import loading, sampling, serving
from tests.golden.tokens import sizes
from tests.kit import each_row
from tests.test_structure import ROOT, imports

CEILINGS: dict[str, int] = {
    # A second call of the demo for 8 tokens, by sys.setprofile: our own files and functions. The
    # suite's checker of annotations passes one more, axes.py, in a call and in a request.
    "files of a warm generate": 19,
    "functions of a warm generate": 138,
    "Python calls of a warm generate": 320,
    "files of a request and 4 steps": 15,
    # Lines that hold a token, comments and docstrings aside.
    "token lines of longspec_jax": 32_076,
    "token lines of infer": 7_894,
    "token lines of train": 5_502,
    "token lines of configs": 327,
    "token lines of tests": 40_566,
    "token lines of benchmarks and contrib": 4_505,
    "declarations of an option beyond its first": 21,
    # Of these folders but the tests: density, and types that say nothing.
    "literal tuples or lists unpacked into calls": 0,
    "** of a variable into calls": 16,
    "lines with ': Any'": 84,
}
SOURCE = "longspec_jax", "infer", "train", "configs"
BESIDE = "benchmarks", "contrib"
"""Outside the wheel; they import the library, and it imports none of them."""
SPACE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def check(name: str, measured: int) -> None:
    """Fail above a ceiling."""
    assert measured <= CEILINGS[name], (
        f"{name}: {measured}, and the ceiling is {CEILINGS[name]}. Let an existing path, "
        "declaration or function serve the change, or delete what it replaces"
    )


def files_of(*folders: str) -> Iterator[Path]:
    """The Python files of folders, as far as there are such."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


class Walk(NamedTuple):
    """What ran of our own."""

    files: set[str]
    functions: set[CodeType]
    calls: int


def walk(work: Callable[[], Any]) -> Walk:
    """The Python functions of ours that run, lambdas, comprehensions and generators included."""
    ran: list[CodeType] = []
    ours = tuple(str(ROOT / folder) for folder in SOURCE)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            ran.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return Walk({code.co_filename for code in ran}, {*ran}, len(ran))


@pytest.fixture(scope="module")
def demo() -> LongSpec:
    return LongSpec.demo(tree="4,8@9")


def test_a_warm_call_passes_few_files(demo: LongSpec) -> None:
    def call() -> None:
        demo.generate("Once upon a time", max_new_tokens=8)

    call()
    # The fewest: how often the host asks for what the device has not finished is the machine's.
    found = min((walk(call) for _ in range(5)), key=lambda found: found.calls)
    check("files of a warm generate", len(found.files))
    check("functions of a warm generate", len(found.functions))
    check("Python calls of a warm generate", found.calls)


def test_a_request_passes_few_files(demo: LongSpec) -> None:
    with demo.engine(**sizes(demo, 2, 128)) as engine:

        def request() -> None:
            engine.submit("Once upon a time", max_new_tokens=8)
            for _ in range(4):
                engine.step()

        request()
        while engine.busy:
            engine.step()
        check("files of a request and 4 steps", len(walk(request).files))


def token_lines(source: str) -> int:
    """Lines that hold a token, without those of comments and of texts that stand for themselves."""
    docstrings, held = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstrings |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SPACE:
            held |= {*range(token.start[0], token.end[0] + 1)}
    return len(held - docstrings)


def test_token_lines_are_counted() -> None:
    source = (
        '"""One.\n\nTwo."""\n\n# No.\nx = (\n    1,  # Yes.\n)\n"""Of x."""\ny = """a\n\nb"""\n'
    )
    assert token_lines(source) == 6


@each_row("folders", [*((each,) for each in SOURCE), ("tests",), BESIDE])
def test_the_tree_stays_small(folders: tuple[str, ...]) -> None:
    lines = sum(token_lines(path.read_text()) for path in files_of(*folders))
    check(f"token lines of {' and '.join(folders)}", lines)


def dense_calls(tree: ast.AST, typed: frozenset[str] = frozenset()) -> Iterator[str]:
    """What a call hides from its reader: arguments in a literal, and variables as keywords.

    Args:
      typed: keyword arguments of the function around it whose types ``Unpack`` gives, or a
        ``ParamSpec``.
    """
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) and tree.args.kwarg is not None:
        own = tree.args.kwarg
        said = "" if own.annotation is None else ast.unparse(own.annotation)
        if "Unpack" in said or said.endswith(".kwargs"):
            typed |= {own.arg}
    if isinstance(tree, ast.Call):
        for given in tree.args:
            if isinstance(given, ast.Starred) and isinstance(given.value, ast.Tuple | ast.List):
                yield "literal tuples or lists unpacked into calls"
        for keyword in tree.keywords:
            if keyword.arg is None and isinstance(keyword.value, ast.Name):
                if keyword.value.id not in typed:
                    yield "** of a variable into calls"
    for node in ast.iter_child_nodes(tree):
        yield from dense_calls(node, typed)


def test_dense_calls_are_found() -> None:
    source = (
        "def f(**options: Unpack[O]):\n    g(*(a, b), *c, **options)\n    g(**more, **{'a': 1})\n"
        "def h(**options):\n    g(**options)\ndef i(**options: P.kwargs):\n    g(**options)\n"
    )
    literal, untyped = [*CEILINGS][-3:-1]
    assert Counter(dense_calls(ast.parse(source))) == {literal: 1, untyped: 2}


def test_calls_say_what_they_pass() -> None:
    found = Counter(name for path in files_of(*SOURCE) for name in dense_calls(parsed(path)))
    for name in [*CEILINGS][-3:-1]:
        check(name, found[name])


def test_types_are_named() -> None:
    lines = (line for path in files_of(*SOURCE) for line in path.read_text().splitlines())
    check("lines with ': Any'", sum(": Any" in line for line in lines))


def declared(tree: ast.AST) -> Iterator[str]:
    """Options that a file declares: annotated fields, entries of tables, and flags of their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if ast.unparse(node.annotation).startswith("Annotated["):
                yield node.target.id
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and ast.unparse(value).startswith("Option("):
                    yield str(key.value)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).endswith(("add", "add_argument")):
                yield str(node.args[0].value).removeprefix("--")


def test_declarations_are_found() -> None:
    source = (
        "class A:\n    top_k: Annotated[int, Whole()]\n    seed: int\n"
        "T = {'slots': Option(Whole())}\nparser.add_argument('--mesh', type=int)\n"
    )
    assert [*declared(ast.parse(source))] == ["top_k", "slots", "mesh"]


def test_an_option_is_declared_once() -> None:
    """Those of calls, of loading and of engines; others may say how they take them together."""
    found = Counter(name for path in files_of(*SOURCE) for name in declared(parsed(path)))
    again = {name: found[name] - 1 for name in (*sampling.OPTIONS, *loading.OPTIONS)}
    again |= {name: found[name] - 1 for name in serving.OPTIONS}
    check("declarations of an option beyond its first", sum(again.values()))


def test_the_library_imports_nothing_that_is_beside_it() -> None:
    for path in files_of(*SOURCE):
        for name, _ in imports(path):
            assert name.split(".")[0] not in {*BESIDE, "tests"}, f"{path} imports {name}"
