"""The decode command: what it prints, what it writes, and how it fails."""

import io
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from infer import arguments, decode, models, session
from infer.screen import Screen, wants_color
from longspec_jax import (
    PLAIN,
    GenerateResult,
    LongSpec,
    MemoryPlan,
    Stats,
    TreeConfig,
    TreeUse,
    demo_prompts,
)
from longspec_jax.compilation import cache_folder, keep_programs
from longspec_jax.drafters.checkpoints.vocabulary import save_draft_vocabulary
from longspec_jax.embedded import DEMO
from longspec_jax.generation.activity import Compiling, TreeTiming, Tuned
from longspec_jax.generation.result import ACCEPTANCE_DEFINITION
from longspec_jax.loading import load_tokenizer
from tests.children import ran
from tests.infer.test_screen import Terminal
from tests.infer.toys import save_toy, toy_tokenizer

REQUIRED = {
    *("acceptance_length", "acceptance_histogram", "new_tokens", "target_passes", "decode_seconds"),
    *("tokens_per_second", "plain_tokens_per_second", "identical_to_plain", "draft_state_bytes"),
    *("prompt_tokens", "text"),
}
PROMPT = "ab cd gh é"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    target, draft = save_toy(tmp_path_factory.mktemp("toy"))
    small = ["--tree=4,5", "--max_new_tokens=24", "--temperature=1", "--prefill_chunk=32"]
    return [f"--target={target}", f"--draft={draft}", *small]


def without_tree(folders: list[str]) -> list[str]:
    """For plain decoding, with which a tree would be a contradiction."""
    return [argument for argument in folders if not argument.startswith("--tree")]


def run_json(folders: list[str], tmp_path: Path, *arguments: str) -> dict:
    path = tmp_path / "out.json"
    assert decode.main([*folders, f"--json={path}", *arguments]) == 0
    return json.loads(path.read_text())


def test_one_prompt(folders, tmp_path, capsys) -> None:
    found = run_json(folders, tmp_path, f"--prompt={PROMPT}", "--ignore_eos")
    assert set(found) >= REQUIRED
    assert found["identical_to_plain"] is True and found["new_tokens"] == 24
    assert found["prompt_tokens"] == len(toy_tokenizer()(PROMPT)["input_ids"])
    assert found["acceptance_length"] == 23 / found["target_passes"] > 1
    assert sum(found["acceptance_histogram"]) == found["target_passes"]
    assert found["tokens_per_second"] == pytest.approx(23 / found["decode_seconds"])
    assert found["plain_tokens_per_second"] > 0 and found["draft_state_bytes"] > 0
    printed = capsys.readouterr().out
    assert found["text"] in printed and "\x1b" not in printed
    assert (
        found["acceptance_definition"] == ACCEPTANCE_DEFINITION and ACCEPTANCE_DEFINITION in printed
    )
    assert f"draft state {found['draft_state_bytes'] / 1e6:.1f} MB, working" in printed
    for words in ("identical to plain  yes, all 24 tokens", "compile", "memory plan", "tokens/s"):
        assert words in printed
    [row] = found["rows"]
    assert row["text"] == found["text"] and len(row["tokens"]) == len(row["drafted"]) == 24


def test_a_budget_changes_the_tree_and_not_the_text(folders, tmp_path, capsys) -> None:
    whole = run_json(folders, tmp_path, f"--prompt={PROMPT}")
    found = run_json(folders, tmp_path, f"--prompt={PROMPT}", "--tree=4,5@5")
    assert len(whole["header"]["commit"]) >= 7 and whole["header"]["versions"]["jax"]
    assert whole["setting"]["budget"] is None and found["setting"]["budget"] == 5
    assert found["text"] == whole["text"] and found["identical_to_plain"] is True
    assert "tree 4,5@5 (the best 5 of 10 nodes per target pass)" in capsys.readouterr().out


def test_text_ends_before_a_stop_string(folders, tmp_path, capsys) -> None:
    """Of the command, or of a row of a batch; compared with plain decoding all the same."""
    whole = run_json(folders, tmp_path, f"--prompt={PROMPT}", "--ignore_eos")["text"]
    first, second = (re.findall("[a-h ]{2}", whole[begin:])[0] for begin in (3, 6))
    command = [*folders, "--ignore_eos", "--stop=zz", f"--stop={first}"]
    found = run_json(command, tmp_path, f"--prompt={PROMPT}")
    assert found["text"] == whole[: whole.index(first)] and found["identical_to_plain"] is True
    assert found["new_tokens"] < 24 and found["setting"]["stop_strings"] == ["zz", first]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": PROMPT, "stop_strings": second}))
    found = run_json(command, tmp_path, f"--batch={tmp_path / 'rows.jsonl'}")
    assert found["text"] == whole[: whole.index(second)]
    capsys.readouterr()
    assert decode.main([*folders, f"--prompt={PROMPT}", *map("--stop={}".format, range(99))]) == 2
    assert "--stop holds 99 texts of 188 characters" in capsys.readouterr().err


def test_options_of_a_draft(folders, tmp_path, capsys) -> None:
    """A vocabulary needs its table next to the draft's weights; the text is the same with both."""
    copies = [shutil.copytree(f.split("=")[1], tmp_path / f.split("/")[-1]) for f in folders[:2]]
    named = [f"--target={copies[0]}", f"--draft={copies[1]}", *folders[2:]]
    few = (f"--prompt={PROMPT}", "--draft_option=vocabulary=6", "--draft_option=int8")
    assert decode.main([*named, *few]) == 2
    assert "draft comes without draft_vocabulary.safetensors" in capsys.readouterr().err
    save_draft_vocabulary(copies[1], [3, 9, 1, 12, 7, 4, 0], 17)
    whole, found = (run_json(named, tmp_path, *options) for options in (few[:1], few))
    options = [run["setting"]["draft_options"] for run in (whole, found)]
    assert options == [{}, {"vocabulary": 6, "int8": True}]
    assert found["text"] == whole["text"] and found["identical_to_plain"] is True
    assert found["memory"]["draft_bytes"] != whole["memory"]["draft_bytes"]
    assert decode.main([named[0], *named[2:], *few]) == 2
    assert "--draft_option is about a draft" in capsys.readouterr().err


def test_color_shows_the_same_text(folders, monkeypatch, capsys) -> None:
    argv = [*folders, f"--prompt={PROMPT}", "--ignore_eos"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert decode.main([*argv, "--no-compare"]) == 0
    colored = capsys.readouterr().out
    assert "\x1b[32m" in colored and "identical to plain" not in colored
    monkeypatch.setenv("NO_COLOR", "1")
    assert decode.main([*argv, "--no-compare", "--no-stream"]) == 0
    plain = capsys.readouterr().out
    for code in ("\x1b[32m", "\x1b[2m", "\x1b[0m"):
        colored = colored.replace(code, "")
    start = plain.index(PROMPT), colored.index(PROMPT)
    assert plain[start[0] :].split("\n\n")[0] == colored[start[1] :].split("\n\n")[0]


def test_several_prompts_have_totals(folders, tmp_path, capsys) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(PROMPT + name.translate({ord(c): "a" for c in "onetw"}))
    files = [f"--prompt_file={tmp_path / name}" for name in ("one", "two")]
    found = run_json(without_tree(folders), tmp_path, *files, "--tree=none")
    assert [row["name"] for row in found["rows"]] == ["one", "two"]
    assert found["acceptance_length"] == 1 and found["identical_to_plain"] is None
    assert found["plain_tokens_per_second"] is None and len(found["text"]) == 2
    assert found["new_tokens"] == sum(row["new_tokens"] for row in found["rows"])
    assert "=== all 2 prompts ===" in capsys.readouterr().out


def test_adaptive_runs_say_what_ran(folders, tmp_path, capsys) -> None:
    found = run_json(folders, tmp_path, f"--prompt={PROMPT}", "--ignore_eos", "--adaptive")
    assert found["identical_to_plain"] is True and found["setting"]["adaptive"] is True
    assert [use["tree"] for use in found["trees"]] == [[], [1], [4, 5]]
    assert sum(use["rounds"] for use in found["trees"]) == found["target_passes"]
    assert sum(use["tokens"] for use in found["trees"]) == 23
    printed = capsys.readouterr().out
    assert "chosen by tokens/s as the run went" in printed and "  plain       none" in printed


def test_batch_rows_equal_lone_runs(folders, tmp_path) -> None:
    path = tmp_path / "batch.jsonl"
    rows = [{"prompt": PROMPT, "seed": 5}, {"input_ids": [3, 4, 5], "max_new_tokens": 7}, "fgh"]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = run_json(folders, tmp_path, f"--batch={path}")
    assert len(found["rows"]) == 3 == len(found["text"]) == len(found["prompt_tokens"])
    assert found["identical_to_plain"] is True and found["rows"][1]["new_tokens"] <= 7
    assert [row["name"] for row in found["rows"]] == [f"batch.jsonl, line {n}" for n in (1, 2, 3)]
    plain = without_tree(folders)
    lone = run_json(plain, tmp_path, f"--prompt={PROMPT}", "--seed=5", "--tree=none")
    assert lone["rows"][0]["tokens"] == found["rows"][0]["tokens"]


def test_json_on_standard_output_is_only_json(folders, capsys) -> None:
    argv = ["--prompt=ab", "--tree=none", "--json=-", "--max_new_tokens=3"]
    assert decode.main([*without_tree(folders), *argv]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["prompt_tokens"] == 2 and "=== prompt" in printed.err
    assert "nothing was timed" not in printed.err, "there was nothing to choose"


def test_default_prompt(folders, monkeypatch, tmp_path) -> None:
    texts = {"first": "ab", session.DEFAULT_PROMPT: "ab" * 20}
    monkeypatch.setattr(session, "demo_prompts", lambda: texts)
    plain = without_tree(folders)
    found = run_json(plain, tmp_path, "--tree=none")
    assert [row["name"] for row in found["rows"]] == [session.DEFAULT_PROMPT]
    found = run_json(plain, tmp_path, "--tree=none", "--all_prompts")
    assert [row["name"] for row in found["rows"]] == list(texts)
    monkeypatch.setattr(session, "demo_prompts", lambda: {})
    assert decode.main(folders) == 2


BAD = {
    "no such target": (["--target=absent", "--prompt=a"], "absent is not a folder"),
    "empty styled prompt": (["--prompt=", "--prompt_style=vicuna"], "the prompt is empty"),
    "no template": (['--messages=[{"role":"user","content":"a"}]'], "no chat template"),
    "too long": (["--prompt=ab", "--max_new_tokens=1023"], "max_positions=1024; lower"),
    "no prompt": (["--max_new_tokens=2"], "name a prompt: without one the demo's document is"),
}
"""Beside what is refused without a model, in :mod:`.test_arguments`."""


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_and_status_2(folders, case, capsys) -> None:
    bad, message = BAD[case]
    given = {argument.split("=")[0] for argument in bad}
    kept = [argument for argument in folders if argument.split("=")[0] not in given]
    assert decode.main([*kept, *bad]) == 2
    printed = capsys.readouterr()
    # A slow machine says meanwhile what it is busy with.
    said = [line for line in printed.err.splitlines() if not line.startswith("... ")]
    assert message in printed.err and said[0].startswith("error: ")
    assert "Traceback" not in printed.err and not printed.out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("int9", "--draft_option: unknown option 'int9'"),
        ("retreive=9", "did you mean 'retrieve'?"),
        ("vocabulary=many", "--draft_option: vocabulary='many' must be"),
        ("retrieve=100", "retrieve=100"),
    ],
)
def test_options_of_a_draft_are_checked_before_anything_is_loaded(
    folders, option, words, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("it was loaded"))
    assert decode.main([*folders, "--prompt=a", f"--draft_option={option}"]) == 2
    assert words in capsys.readouterr().err


def test_an_attention_that_is_not_there_is_named_as_typed(capsys) -> None:
    argv = ["--prompt=ab", "--attention=mosaic", "--tree=none"]
    assert decode.main(argv) == 2
    said = capsys.readouterr().err
    assert "choose another attention=" in said and "implementation" not in said


def test_failures_while_running_are_status_1(folders, monkeypatch, capsys) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(LongSpec, "generate", fail)
    assert decode.main([*without_tree(folders), "--prompt=a", "--tree=none"]) == 1
    assert capsys.readouterr().err == "failed while running: RuntimeError: the device is gone\n"


@pytest.mark.multiproc
def test_command_line_exit_status() -> None:
    """The module as a program: no traceback, and status 2."""
    ended = ran("-m", "infer.decode", "--prompt=a", "--tree=0")
    assert ended.status == 2 and ended.errors.startswith("error: --tree: tree widths"), ended


def test_color_only_on_terminals(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with open(os.devnull) as pipe:
        assert wants_color(Terminal()) and not wants_color(pipe)
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert wants_color(pipe)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())
    assert Screen(False).legend() == ""


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """No folder keeps programs yet; afterwards the tests' own one does again."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_compilation_cache_folder(nothing_kept, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LONGSPEC_CACHE", raising=False)
    assert keep_programs() == tmp_path / "longspec_jax" / "compiled"
    assert "compiles at first calls, for up to a minute" in capsys.readouterr().err
    assert keep_programs(str(tmp_path / "mine")) == tmp_path / "mine"
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "mine")
    assert keep_programs() == tmp_path / "mine"
    jax.config.update("jax_compilation_cache_dir", None)
    for off in ("off", "OFF"):
        monkeypatch.setenv("LONGSPEC_CACHE", off)
        assert keep_programs() is None
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path / "file"))
    assert keep_programs() is keep_programs() is None  # A command and its model ask; said once.
    assert capsys.readouterr().err.count("cannot keep compiled programs in") == 1


def test_only_a_folder_of_ones_own_keeps_programs(
    nothing_kept, monkeypatch, tmp_path, capsys
) -> None:
    """What others may write there would run here."""
    default, named = tmp_path / "longspec_jax", tmp_path / "a" / "named"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LONGSPEC_CACHE", raising=False)
    umask = os.umask(0)
    try:
        keep_programs()
        made = default, default / "compiled"
        assert [one.stat().st_mode & 0o777 for one in made] == [0o700, 0o700]
        jax.config.update("jax_compilation_cache_dir", None)
        for folder in made:
            for mode in (0o770, 0o702):
                folder.chmod(mode)
                assert keep_programs() is None
                said = capsys.readouterr().err
                assert f"kept in {folder} (others may write to it, mode {mode:o})" in said
                assert folder is not default or cache_folder() is None
            folder.chmod(0o755)  # As those of before were made.
        named.mkdir(parents=True, mode=0o777)
    finally:
        os.umask(umask)
    monkeypatch.setenv("LONGSPEC_CACHE", str(named))
    for work in (keep_programs, cache_folder, lambda: keep_programs(named)):
        with pytest.raises(ValueError, match=r"mode 777\): what others put .* does not exist"):
            work()
    named.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(named, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ValueError, match=f"it belongs to user {named.stat().st_uid}"):
        keep_programs()
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_the_command_keeps_programs_in_the_cache(
    nothing_kept, folders, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(LongSpec, "generate", first_token_only)
    argv = [*without_tree(folders), "--prompt=ab", "--no-compare", "--tree=none"]
    assert decode.main(argv) == 0
    assert jax.config.values["jax_compilation_cache_dir"] is None  # The tests keep nothing.
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    assert decode.main(argv) == 0
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "compiled")


@pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")
def test_demo_prompts_fit_the_demo_model() -> None:
    texts = demo_prompts()
    assert len(texts) > 1
    tokenizer = load_tokenizer(DEMO / "target")
    lengths = {name: len(tokenizer(text)["input_ids"]) for name, text in texts.items()}
    assert lengths[session.DEFAULT_PROMPT] >= 8000 and max(lengths.values()) + 256 <= 16384


def first_token_only(self, tokens, **options) -> GenerateResult:
    """A call whose text ends with its first token."""
    memory = MemoryPlan(1, 256, 1, 2, 3, 4, 5)
    trees = (TreeUse("plain", PLAIN, 0, 0, 0.0),)
    found = Stats((2,), (1,), (0,), ((0,),), trees, 1.0, 0.0, 0.0, 0, memory)
    return GenerateResult(((0,),), ("",), ((False,),), found)


def test_a_text_that_ends_at_once_says_why(folders, monkeypatch, capsys) -> None:
    monkeypatch.setattr(LongSpec, "generate", first_token_only)
    argv = [*folders, "--prompt=ab", "--no-compare"]
    assert decode.main(argv) == 0
    said = "no text: the first token of prompt ends the text (EOS); --ignore_eos goes on past it"
    assert said in capsys.readouterr().out
    assert decode.main([*argv, "--max_new_tokens=1"]) == 0
    assert said not in capsys.readouterr().out


def test_the_prompt_and_its_completion_are_told_apart(folders, monkeypatch, capsys) -> None:
    monkeypatch.setattr(LongSpec, "generate", first_token_only)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("cd é".encode())))
    assert decode.main([*folders, "--prompt_file=-", "--no-compare"]) == 0
    assert "cd é\n--- completion ---\n" in capsys.readouterr().out


def test_numbers_that_cannot_be_written_are_not_lost(
    folders, monkeypatch, tmp_path, capsys
) -> None:
    """The folder goes during the run."""
    folder = tmp_path / "runs"
    folder.mkdir()

    def call(self, *args, **options):
        folder.rmdir()
        return first_token_only(self, *args, **options)

    monkeypatch.setattr(LongSpec, "generate", call)
    argv = [*folders, "--prompt=ab", "--no-compare", f"--json={folder / 'out.json'}"]
    assert decode.main(argv) == 1
    said = capsys.readouterr().err
    rescued = Path(said.split("the numbers are in ")[1].strip())
    assert "out.json cannot be written: No such file" in said
    assert json.loads(rescued.read_text())["new_tokens"] == 1
    rescued.unlink()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input_ids": [3, 99]}', "batch.jsonl, line 2: token id 99 is outside"),
        ('{"prompt": "ab", "max_new_tokens": 5000}', "batch.jsonl, line 2: a prompt of 2 tokens"),
    ],
)
def test_rows_are_named_by_their_line(folders, tmp_path, line, message, capsys) -> None:
    """Also where only the model can tell, and before anything is printed."""
    path = tmp_path / "batch.jsonl"
    path.write_text(f'"ab"\n{line}')
    assert decode.main([*folders, f"--batch={path}"]) == 2
    printed = capsys.readouterr()
    assert f"error: {message}" in printed.err and not printed.out


def test_what_is_under_way_and_what_was_settled(folders, monkeypatch, tmp_path, capsys) -> None:
    """Before the end of the prompt, so that its completion follows it."""
    seen, tree = [], TreeConfig((1, 1))
    monkeypatch.setattr(Screen, "status", lambda screen, *words: seen.append(words))

    def call(self, tokens, *, on_activity, **options):
        on_activity(Compiling())
        timings = TreeTiming("plain", PLAIN, 0.01, 1.0), TreeTiming("longspec", tree, 0.01, 2.5)
        on_activity(Tuned("longspec", tree, timings))
        return first_token_only(self, tokens, **options)

    monkeypatch.setattr(LongSpec, "generate", call)
    plain = [*without_tree(folders), "--prompt=ab", "--no-compare"]
    found = run_json(plain, tmp_path)
    printed = capsys.readouterr().out
    assert ("compiling, once for prompts of about this length", "") in seen
    assert "a tree that fits this machine, temperature 1" in printed
    assert (
        "tree chain:2 (3 nodes per target pass), the fastest of 2 in earlier calls here: "
        "250 tokens/s, 100 without" in printed
    )
    assert printed.index("250 tokens/s") < printed.index("ab\n--- completion ---")
    assert found["setting"]["tree"] == [1, 1]


@pytest.mark.filterwarnings("default")
def test_warnings_wait_until_the_text_is_shown(folders, monkeypatch, capsys) -> None:
    def call(self, *args, **options):
        warnings.warn("0 of the draft's proposals were accepted", UserWarning, stacklevel=2)
        return first_token_only(self, *args, **options)

    monkeypatch.setattr(LongSpec, "generate", call)
    assert decode.main([*folders, "--prompt=ab", "--no-compare"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("note: 0 of the draft's proposals were accepted\n")
    assert "UserWarning" not in printed.err


def test_platforms_that_do_not_start(monkeypatch) -> None:
    """Some plugins fail without a word."""

    def fail():
        raise AssertionError

    monkeypatch.setattr(models.jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS=cuda .* cannot start here \(AssertionErr"):
        models.check_devices()
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(AssertionError):
        models.check_devices()


@pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")
def test_the_demo_by_its_name(monkeypatch, tmp_path) -> None:
    """With its own draft, or with a draft of the user's."""
    found = []
    monkeypatch.setattr(
        LongSpec,
        "from_pretrained",
        lambda target, draft=None, **options: found.append((target, draft)),
    )
    for typed in ([], ["--target=demo"], ["--target=demo", f"--draft={tmp_path}"]):
        named = arguments.models_of(arguments.parser().parse_args(typed))
        models.load(named, *models.fetch(named))
    demo = (DEMO / "target", [DEMO / "draft"])
    assert found == [demo, demo, (DEMO / "target", [tmp_path])]
