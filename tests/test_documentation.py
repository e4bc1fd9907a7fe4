"""What the documentation names exists: files, decisions, commands and their options."""

import argparse
import dataclasses
import functools
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import longspec_jax
from benchmarks import arguments as bench_arguments
from contrib import quantise
from infer import arguments, chat
from infer.eval import arguments as eval_arguments
from infer.report import __main__ as report
from infer.serve import arguments as serve_arguments
from infer.serve.openapi import GETS, POSTS
from longspec_jax import LongSpec
from longspec_jax.cli import SCRIPTS, ByMachine, typed
from longspec_jax.config.known import TARGETS
from longspec_jax.decoding.cache import cache_bytes
from longspec_jax.decoding.runner import bucket_capacity, slack_slots
from longspec_jax.drafters import registry
from longspec_jax.drafters.retrieval.hierarchy import RetrievalOptions
from longspec_jax.provenance import provenance
from longspec_jax.weights.families import FAMILIES
from longspec_jax.weights.gguf.architectures import ARCHITECTURES
from tests.kit import each_row
from train import arguments as train_arguments
from train import prepare, questions, regenerate, vocabulary
from train.config import DraftSettings, RunConfig
from train.drafts.kinds import KINDS

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "deploy").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
FOLDERS = "longspec_jax", "train", "infer", "configs", "benchmarks", "contrib", "tests"
CODE = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
RESULTS = ROOT / "docs" / "results"
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
DECISION = re.compile(r"decisions? (4\.\d+)")
NAME_IN_FILE = re.compile(r"`([A-Za-z_]\w*)`(?:\s+of|\s+in)?\s+\(?\[[^\]]*\]\(([^)#]+\.py)\)")
"""Such as ``NAMED`` of registry.py, where the file is a link."""
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)}|docs)/[\w./-]*)`")


def headings(page: Path) -> list[str]:
    return HEADING.findall(page.read_text())


def anchors(page: Path) -> set[str]:
    """The names under which GitHub links to a page's headings."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings(page))
    return {heading.replace(" ", "-") for heading in plain}


@each_row("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_names_are_in_the_files_that_are_linked_beside_them() -> None:
    """So that the recipes of CONTRIBUTING lead to what they speak of."""
    named = {(page, *found) for page in PAGES for found in NAME_IN_FILE.findall(page.read_text())}
    assert {"NAMED", "FAMILIES", "Objective"} <= {name for _, name, _ in named}
    for page, name, file in named:
        text = (page.parent / file).read_text()
        assert re.search(rf"\b{name}\b", text), f"{page.name} seeks {name} in {file}"


def test_paths_of_the_checkout_exist() -> None:
    """Those that are no links; the changelog may name some that are gone."""
    for page in PAGES:
        paths = [] if page.name == "CHANGELOG.md" else PATH.findall(page.read_text())
        gone = [path for path in paths if not (ROOT / path).exists()]
        assert not gone, f"{page.name}: {gone}"


def test_pages_and_raw_files_that_code_names_exist() -> None:
    named = {
        (path.name, found)
        for path in CODE
        for found in re.findall(r"docs/\w[\w/]+\.(?:md|json)", path.read_text())
    }
    assert ("registry.py", "docs/guides/drafts.md") in named
    others = {"docs/gguf.md", "docs/x.md"}  # ggml's own page, and an example of a test.
    gone = [each for each in named if each[1] not in others and not (ROOT / each[1]).exists()]
    assert not gone


def test_cited_decisions_exist() -> None:
    pages = (ROOT / "docs" / folder / "decisions.md" for folder in ("design", "archive"))
    decisions = {heading.split()[0] for page in pages for heading in headings(page)}
    cited = {
        (path.name, number)
        for path in (*CODE, *PAGES)
        if path != Path(__file__)
        for number in DECISION.findall(path.read_text())
    }
    assert ("sampling.py", "4.1") in cited
    assert {number for _, number in cited} <= decisions


def test_a_decision_is_a_short_record_with_a_day_and_a_status() -> None:
    text = (ROOT / "docs" / "design" / "decisions.md").read_text()
    first, *records = re.split(r"^### (?=4\.)", text, flags=re.MULTILINE)
    assert len(records) > 50
    for record in records:
        title, status, *lines = record.split("## ")[0].splitlines()
        assert re.match(r"\*2026-\d\d-\d\d, [^*]+\.\*", status), title
        assert len(lines) < 15, title


MOVED = {
    "python -m infer.bench": "python -m benchmarks",
    "python -m train.bench": "python -m benchmarks train",
    "python -m infer.quantise": "python -m contrib.quantise",
    "python -m train.plot": "",
    "python -m contrib.plot": "",
}
"""Commands as older entries of the changelog have them, and as they are now; empty if gone."""


def text_of(page: Path) -> str:
    """A page's text, its scripts as modules, commands of the changelog by their names of today."""
    text = page.read_text()
    for old, new in MOVED.items() if page.name == "CHANGELOG.md" else ():
        text = text.replace(old, new)
    for module, script in SCRIPTS.items():
        text = re.sub(rf"\b{script}\b(?![-.])", f"python -m {module}", text)
    return text


def block_lines(text: str) -> list[str]:
    """The commands in a page's blocks, without comments, each on one line."""
    joined = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [line.split(" #")[0] for line in joined.splitlines()]


@each_row("page", PAGES)
def test_commands_exist(page: Path) -> None:
    for module in re.findall(
        r"python -m ((?:train|infer|benchmarks|contrib)[\w.]*)", text_of(page)
    ):
        found = importlib.util.find_spec(module)
        assert found is not None, f"{page.name}: python -m {module}"
        if found.submodule_search_locations:
            assert importlib.util.find_spec(f"{module}.__main__"), f"python -m {module}"


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, and of each benchmark."""
    [benchmarks] = (
        action.choices
        for action in bench_arguments.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {
        "infer.chat": chat.parser(),
        "infer.decode": arguments.parser(),
        "infer.eval": eval_arguments.parser(),
        "infer.report": report.parser(),
        "infer.serve": serve_arguments.parser(),
        **{f"benchmarks {name}": parser for name, parser in benchmarks.items()},
        **{module.__name__: module._parser() for module in (quantise, vocabulary)},
        "train.prepare": prepare.parser(),
        "train.questions": questions.parser(),
        "train.regenerate": regenerate.parser(),
        "train.run": train_arguments.training_parser(),
    }


def options_of(command: str) -> set[str]:
    """The options that a command has."""
    return {option for action in parsers()[command]._actions for option in action.option_strings}


COMMAND = re.compile(
    r"python -m "
    r"(benchmarks [a-z]+|infer\.(?:chat|decode|eval|report|serve)|contrib\.\w+|train\.\w+)"
    r"(.*)",
    re.DOTALL,
)
OPTION = re.compile(r"--\w[\w.-]*")
OTHERS_OPTIONS = ("--config", "--xla_", "--gpu", "--ntasks", "--signal", "--requeue")
"""Of a configuration's fields, which have a test of their own, of XLA and of Slurm."""


@each_row("page", PAGES)
def test_options_exist(page: Path) -> None:
    """In commands, and where they stand alone; the changelog may name some that are gone."""
    every, text = set().union(*map(options_of, parsers())), text_of(page)
    words = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for piece in (*block_lines(text), *(word.split("#")[0] for word in words)):
        if command := COMMAND.search(piece):
            missing = _named(command[2]) - options_of(command[1])
        elif piece.startswith("--") and page.name != "CHANGELOG.md":
            missing = _named(piece) - every
        else:
            continue
        assert not missing, f"{page.name}: {piece}"


@each_row("page", PAGES)
def test_commands_of_blocks_can_be_typed(page: Path) -> None:
    """They are read to the end, as they are typed; those that train, below."""
    for line in block_lines(text_of(page)):
        command = COMMAND.search(line.split(" < ")[0])
        if command and command[1] not in ("train.run", "train.prepare"):
            parsers()[command[1]].parse_args(shlex.split(command[2]))


def test_every_option_says_what_it_does_and_its_default() -> None:
    for command, parser in parsers().items():
        text = "".join(parser.format_help().split())
        for action in parser._actions:
            where = f"{command}: {action.option_strings or action.dest}"
            assert action.help, where
            default = action.default
            if action.nargs == 0 or default in (None, False, argparse.SUPPRESS):
                continue  # A flag, or what happens without it, which its help says in words.
            words = str(default) if isinstance(default, ByMachine) else f"default {typed(default)}"
            assert words.replace(" ", "") in text, where


def _named(piece: str) -> set[str]:
    return {name for name in OPTION.findall(piece) if not name.startswith(OTHERS_OPTIONS)}


FIELD = re.compile(r"--config\.([a-z]\w*(?:\.\w+)*)")


def has_field(kind: Any, path: Sequence[str]) -> bool:
    """Whether a dotted name is one of a configuration's fields; stages have names of their own."""
    if typing.get_origin(kind) is types.UnionType:
        kind = typing.get_args(kind)[0]
    if not path or not dataclasses.is_dataclass(kind):
        return not path
    if kind is DraftSettings:
        return any(has_field(each.settings, path) for each in KINDS.values())
    fields = typing.get_type_hints(kind)
    first, *rest = path
    if first == "stages":
        return has_field(typing.get_args(fields[first])[0], rest[1:])
    return first in fields and has_field(fields[first], rest)


@each_row("page", PAGES)
def test_fields_of_configurations_exist(page: Path) -> None:
    missing = [f for f in FIELD.findall(page.read_text()) if not has_field(RunConfig, f.split("."))]
    assert not missing


def test_fields_that_do_not_exist_are_seen() -> None:
    assert has_field(RunConfig, "stages.short.data.files".split("."))
    assert has_field(RunConfig, "data.corpus.max_bytes".split("."))
    for absent in ("sed", "draft.windw", "stages.short.files", "seed.x"):
        assert not has_field(RunConfig, absent.split("."))


def training_commands() -> list[str]:
    """Every command of the pages' blocks and of ``deploy/`` that trains, its lines joined."""
    lines = [line for page in PAGES for line in block_lines(page.read_text())]
    lines += (ROOT / "deploy" / "train.slurm").read_text().replace("\\\n", " ").splitlines()
    lines += [job["spec"]["template"]["spec"]["containers"][0]["args"][0] for job in manifests()]
    trains = (line.partition("python -m train.run ")[2] for line in lines)
    return [given for given in trains if "--config=" in given]


def manifests() -> list[dict[str, Any]]:
    """The jobs that train."""
    text = (ROOT / "deploy" / "train.yaml").read_text()
    return [each for each in yaml.safe_load_all(text) if each["kind"] == "Job"]


def test_training_commands_can_be_typed() -> None:
    """They are read to the end, as ``train.run`` reads them."""
    commands = training_commands()
    assert len(commands) >= 5
    for command in commands:
        numbered = command.replace("$JOB_COMPLETION_INDEX", "1")
        parsed = train_arguments.parse(shlex.split(numbered))
        assert parsed.config.stages or parsed.config.pretraining
        if parsed.options.coordinator:
            [job] = manifests()
            assert parsed.options.coordinator.startswith(f"{job['metadata']['name']}-0.")
            assert (
                parsed.options.processes == job["spec"]["parallelism"] == job["spec"]["completions"]
            )


def tables() -> types.ModuleType:
    """The command that renders the tables; it stands with the pages and belongs to no package."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_results_are_those_of_the_raw_files() -> None:
    """``python docs/tables.py`` would change nothing."""
    module = tables()
    assert module.chart() == module.FIGURE.read_text()
    rendered = [name for page in PAGES for _, name, _ in module.BLOCK.findall(page.read_text())]
    assert len(rendered) > 20
    described = tomllib.loads((ROOT / "docs" / "results" / "tables.toml").read_text())
    assert sorted(rendered) == sorted(described.keys() - {"columns", "names"})
    for page in module.PAGES:
        assert module.written(page) == page.read_text(), f"{page.name}: run python docs/tables.py"


def test_a_changed_figure_is_rendered_anew(tmp_path: Path) -> None:
    module = tables()
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: match -->\n| 26 of 26 |\n<!-- end -->\nafter\n")
    assert "| 20 of 26 |" in module.written(page) and "26 of 26" not in module.written(page)
    assert module.written(page).startswith("before\n") and module.written(page).endswith("after\n")
    page.write_text("<!-- table: none_of_this_name -->\n<!-- end -->\n")
    with pytest.raises(KeyError, match="none_of_this_name"):
        module.written(page)


def test_gains_are_over_the_fastest_plain_decoding() -> None:
    """README's, as a short computation of its own has them, for one shape."""
    module = tables()
    own = {"shape": "llama3-8b", "context": 131072}
    [fastest] = (
        row["plain_ms_per_token"]
        for row in module.rows_of("same_bits_speed_h200")
        if row.items() >= own.items() and not row["same_bits"]
    )
    [round_] = (
        row
        for row in module.rows_of("rounds_h200")
        if row.items() >= own.items() and row["draft"] == "longspec"
    )
    gain = fastest * round_["acceptance_length"] / round_["round_ms"]
    assert fastest < round_["plain_ms_per_token"]
    [line] = (x for x in module.render("speed", ROOT / "README.md").splitlines() if "128k" in x)
    assert line.endswith(f"| {gain:.1f}× |")
    assert f"({gain:.1f}×)" in module.chart()


def test_an_origin_has_the_dates_and_devices_of_its_rows() -> None:
    header = {"device": "GPU", "commit": "a" * 40, "date": "2026-11-24T17:12"}
    rows = [
        {"file": "f", "header": header},
        {"file": "f", "header": {**header, "devices": 2}, "commit": "b" * 40, "date": "2026-11-26"},
    ]
    origin = " ".join(tables()._origin(rows, ROOT / "README.md"))
    assert "1 to 2 x GPU, 2026-11-24 at aaaaaaa; 2026-11-26 at bbbbbbb." in origin


def test_differences_of_drafts_are_means_over_pairs() -> None:
    """As a short computation of its own has them, for one figure."""
    names = ("reproduction_h200", "reproduction_second_target_h200")
    studies = [json.loads((RESULTS / f"{name}.json").read_text())["drafts"] for name in names]
    loss = [
        {name: np.mean(draft["scores"]["contexts"]["512"]["loss"]) for name, draft in study.items()}
        for study in studies
    ]
    pairs = [of[f"shift1-{n}"] - of[f"plain-{n}"] for of, n in zip(loss, (1, 2), strict=True)]
    pairs.append(loss[1]["shift1-3"] - loss[1]["plain-3"])
    shown = f"{np.mean(pairs):+.3f} ± {np.std(pairs, ddof=1) / 3**0.5:.3f}"
    table = tables().render("difference-loss", ROOT / "docs" / "archive" / "reproduction.md")
    assert shown in next(line for line in table.splitlines() if "`shift1`" in line)


NUMBER = re.compile(r"(?<![\w.,:=-])-?\d[\d,]*(?:\.\d+)?(?![\w.]*\w)")
NO_FIGURES = re.compile(
    r"`[^`]*`|\b20\d\d-\d\d-\d\d\b|\b(?:rows?|runs?) \d+(?:(?:,| and| to) \d+)*"
)
"""Code, dates, and places in a raw file."""
SCALES = (1, 100, 1e3, 1e6, 1e-3, 1e-6, 1e-9, 1 / 1024)
"""Of units: shares as per cent, seconds as milliseconds, bytes as GB, tokens in thousands."""


def sentences(text: str) -> list[str]:
    """Those of the running text, without tables and code."""
    prose = re.sub(r"```.*?```", "\n\n", tables().BLOCK.sub("\n\n", text), flags=re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*- |\|)", prose)
    lines = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return [each for line in lines for each in re.split(r"(?<=[.:;])\s+(?=[A-Z`*(\[-])", line)]


def figures(sentence: str) -> list[str]:
    """The numbers of a sentence that are no names, dates or parts of a link's address."""
    return NUMBER.findall(NO_FIGURES.sub("", re.sub(r"\]\([^)]*\)", "]", sentence)))


def recorded(data: Any) -> set[float]:
    """All numbers of a raw file, of its words too, the lengths of lists and the sums of columns."""
    match data:
        case bool() | None:
            return set()
        case int() | float():
            return {float(data)}
        case str():
            return {
                float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", data)
            }
        case dict():
            return set().union(*(recorded(each) for pair in data.items() for each in pair))
    found: set[float] = set().union({float(len(data))}, *map(recorded, data))
    rows = [row for row in data if isinstance(row, dict)]
    for field in {key for row in rows for key in row}:
        column = [row[field] for row in rows if isinstance(row.get(field), int | float)]
        found.add(float(sum(column)))
    return found


def is_recorded(figure: str, values: set[float]) -> bool:
    """Whether a value of a raw file, rounded as the figure is, is the figure."""
    digits, wanted = len(figure.partition(".")[2]), abs(float(figure.replace(",", "")))
    return any(
        abs(round(abs(value) * scale, digits) - wanted) < 1e-9
        for value in values
        for scale in SCALES
    )


def test_figures_beside_a_raw_file_are_in_it() -> None:
    """Of every sentence that links to one; tables are rendered, and compared above."""
    checked = 0
    for page in PAGES:
        for sentence in sentences(page.read_text()):
            names = re.findall(r"results/(\w+\.json)\)", sentence)
            if not names:
                continue
            values = set().union(
                *(recorded(json.loads((RESULTS / name).read_text())) for name in names)
            )
            missing = [each for each in figures(sentence) if not is_recorded(each, values)]
            assert not missing, f"{page.name}: {missing} in {sentence}"
            checked += len(figures(sentence))
    assert checked > 20


def test_a_wrong_figure_is_seen() -> None:
    """By number and by unit, and no name is taken for a figure."""
    values = recorded(
        {"rows": [{"seconds": 1.2081, "new_tokens": 48}] * 6, "note": "an H100, jax 0.11"}
    )
    sentence = "On an H100 `--x=3` took 1,208 ms for 288 tokens of Llama-3-8B ([raw](r/a_9.json))."
    assert figures(sentence) == ["1,208", "288"]
    assert all(is_recorded(each, values) for each in figures(sentence))
    assert not is_recorded("1,213", values) and not is_recorded("289", values)


def test_python_of_the_pages_compiles() -> None:
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            compile(block, str(page), "exec")


def test_lines_end_at_100_characters() -> None:
    """But for tables, which Markdown cannot break, and what is rendered."""
    block = tables().BLOCK
    for page in PAGES:
        prose = block.sub("", page.read_text()).splitlines()
        long = [line for line in prose if len(line) > 100 and not line.startswith("|")]
        assert not long, f"{page.name}: {long[0]}"


def test_a_guide_names_every_entry_of_its_table() -> None:
    tables = {"benchmarks": bench_arguments.BENCHMARKS, "drafts": registry.NAMED}
    tables |= {"gguf": ARCHITECTURES, "serving": GETS | POSTS, "targets": FAMILIES}
    for guide, entries in tables.items():
        # A route stands behind its method.
        named = re.findall(r"[` ]([^` ]+)`", (ROOT / f"docs/guides/{guide}.md").read_text())
        assert [entry for entry in entries if entry not in named] == [], guide


def test_every_option_of_a_draft_is_described() -> None:
    page = (ROOT / "docs" / "guides" / "decoding.md").read_text()
    [table] = re.findall(r"^## Draft options$(.*?)^### ", page, re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"[`,] ?`?([a-z][a-z_0-9]*)[=`]", table))
    kinds = [kind for kind in vars(registry).values() if isinstance(kind, registry.Kind)]
    types = [kind.options_type for kind in (*kinds, *registry.NAMED.values())]
    every = {
        field.name
        for options in (*types, RetrievalOptions)
        for field in dataclasses.fields(options)
        if field.init
    }
    assert len(every) > 15
    assert every - named == set()


def test_every_public_name_is_described() -> None:
    """Of the library, and the methods of its main class."""
    methods = [name for name, _ in inspect.getmembers(LongSpec, callable) if name[0] != "_"]
    code = " ".join(
        piece
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for piece in re.findall(r"`[^`\n]+`|```python.*?```", page.read_text(), re.DOTALL)
    )
    words = set(re.findall(r"\w+", code))
    assert {"generate", "engine"} <= set(methods)
    assert set(longspec_jax.__all__).union(methods) - words == set()


def test_memory_that_the_guides_name_is_that_of_the_plan() -> None:
    """Of Llama-3.1-8B in 16 bits: a token, a row of 32k, and a server's slots with their logits."""
    config = dataclasses.replace(TARGETS["llama31-8b"].config, dtype="bfloat16")
    token, row = cache_bytes(config, 1, 1), cache_bytes(config, 1, 32_768)
    logits = 6 * 4 * 64 * config.vocab_size  # Copies, float32, nodes: memory.py of the plan.
    slots = [
        cache_bytes(config, 1, bucket_capacity(context + slack_slots(5))) + logits
        for context in (32_768, 131_072)
    ]
    memory, serving = (
        " ".join((ROOT / "docs" / "guides" / f"{name}.md").read_text().split())
        for name in ("memory", "serving")
    )
    assert f"{token / 1e3:.0f} kB a token in 16 bits, so {row / 1e9:.1f} GB at 32k" in memory
    assert f"some {logits / 1e9:.1f} GB for its logits" in serving
    named = [f"{each / 1e9:.3g}".removesuffix(".0") for each in slots]
    assert f"{float(named[0]):.0f} GB at 32k and {named[1]} GB at 128k" in serving


def test_extras_are_described_and_those_that_are_named_exist() -> None:
    """In pages, container files, notebooks and CI: pip only warns of an extra that is gone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = set(re.findall(r"`(\w+)`", (ROOT / "docs/tutorials/first-run.md").read_text()))
    assert project["optional-dependencies"].keys() - words == set()
    files = [*PAGES, *(ROOT / "deploy").iterdir(), *(ROOT / "notebooks").glob("*.ipynb")]
    named = {
        (file.name, extra)
        for file in (*files, ROOT / ".ci" / "run", ROOT / "mkdocs.yml")
        for extras in re.findall(r"(?:\.|longspec_jax|/src)\[([a-z\d,]+)\]", file.read_text())
        for extra in extras.split(",")
    }
    assert {("Containerfile", "serve"), ("own-draft.md", "train")} <= named
    gone = {each for each in named if each[1] not in project["optional-dependencies"]}
    assert not gone


def test_new_raw_files_say_where_they_are_from() -> None:
    """Older ones lack the driver, the processor and whether files of the commit were changed."""
    wanted = set(provenance("here"))
    headers = [
        (path.name, header)
        for path in RESULTS.glob("*.json")
        for header in _headers(json.loads(path.read_text()))
    ]
    assert len(headers) > 50
    for name, header in headers:
        assert {"device", "date"} <= header.keys(), name
        assert header["date"] < "2026-11-28" or wanted <= header.keys(), name


def _headers(data: dict[str, Any]) -> list[dict[str, Any]]:
    found = data.get("headers") or [run["header"] for run in data.get("runs", ())]
    found = found or [data.get("header", data)]
    return [header | header.get("provenance", {}) for header in found]


def test_every_raw_file_is_listed() -> None:
    page = (ROOT / "docs" / "archive" / "raw.md").read_text()
    assert [path.name for path in RESULTS.glob("*.json*") if path.name not in page] == []


def test_the_pages_are_read() -> None:
    """Guards against a moved folder turning the checks above into nothing."""
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "docs/guides/data.md"} <= names
    assert len(CODE) > 100
