"""Peers next to ours, without an engine: rows of one schema, arithmetic of texts, refusals."""

import argparse
import json
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks.arguments import MEASURED, PEERS, SHAPES
from benchmarks.attention import Case, tree_mask
from benchmarks.peers import (
    attention,
    gpt_fast,
    jetspec,
    llama_cpp,
    ours,
    rows,
    run,
    vllm_engine,
)

JOB = rows.Job(
    what="real",
    drafter="ngram",
    shape="small",
    model="folder",
    contexts=(),
    batches=(1,),
    temperatures=(0.0,),
    tau=3.47,
    new_tokens=5,
    repetitions=1,
    texts=((3, 5, 7), (11,)),
    draft="folder/draft",
    rows="rows.jsonl",
)
RECORDER = """
import json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.path.join(os.path.dirname(__file__), "child"), "w").write(str(child.pid))
job = json.load(open(sys.argv[1]))
with open(job["rows"], "a") as file:
    file.write(json.dumps({"what": job["what"], "shape": job["shape"], "ms": 2.5}) + "\\n")
sys.exit(3)
"""


def text(number: int, sequence: list[int], *, accepted: int | None) -> rows.Row:
    """The row of a text of 256 tokens that took 2 s."""
    row = rows.text_row(JOB, sequence, 2.0, 0.25, accepted)
    return (
        row
        | {"what": "real", "shape": "small", "context": 256, "temperature": 0.0}
        | {"text": number}
    )


def test_every_engine_is_an_option_and_measures_something_known() -> None:
    assert list(run.ENGINES) == list(PEERS)
    assert all(set(engine.drafters) <= set(MEASURED) for engine in run.ENGINES.values())


def test_decoding_is_timed_from_the_first_draft_on() -> None:
    class Drafter:
        def propose_logits(self, context: str, depth: int, target_hidden: None) -> int:
            return depth

    clock = jetspec.Clock(Drafter())
    assert clock.propose_logits("a", 3) == 3
    begin = clock.begin
    assert begin is not None and clock.propose_logits("b", 4) == 4 and clock.begin == begin


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    JOB.write(tmp_path / "job.json")
    assert rows.Job.read(str(tmp_path / "job.json")) == JOB


def test_a_row_has_the_schema_and_nothing_else() -> None:
    row = rows.whole({"what": "plain", "ms": 4.5}, "vllm", "0.26.0")
    assert list(row) == list(rows.FIELDS)
    assert (row["peer"], row["version"], row["ms"], row["tau"]) == ("vllm", "0.26.0", 4.5, None)
    with pytest.raises(ValueError, match="vllm answered speed; a row has peer, version"):
        rows.whole({"speed": 1}, "vllm", None)


def test_figures_of_a_text_by_hand() -> None:
    """9 tokens after the first, of which 3 were accepted: 6 forwards in 2 s."""
    row = text(0, [*range(10)], accepted=3)
    assert row["tau"] == 1.5 and row["ms"] == 333.3 and row["tokens_per_second"] == 4.5
    assert row["prefill_ms"] == 250.0
    assert text(0, [*range(10)], accepted=None)["tau"] is None


def test_texts_are_merged_and_compared_with_plain_decoding_of_the_peer() -> None:
    plain = [text(0, [*range(10)], accepted=None), text(1, [*range(4)], accepted=None)]
    found = [text(0, [0, 9, *range(2, 10)], accepted=3), text(1, [*range(4)], accepted=1)]
    [row] = rows.merged_texts(found, plain)
    assert (row["differing_tokens"], row["new_tokens"], row["batch"]) == (1, 14, 1)
    # 9 + 3 tokens in 4 s; 6 + 2 forwards.
    assert (row["tokens_per_second"], row["ms"], row["tau"]) == (3.0, 500.0, 1.5)
    [other] = rows.merged_texts(found, plain[:1])
    assert other["differing_tokens"] is None, "a text without plain decoding beside it"
    assert rows.differing([1, 2], [1, 2, 3]) == 1


def test_what_a_point_raises_is_its_refusal(tmp_path: Path) -> None:
    job = replace(JOB, contexts=(2, 3), rows=str(tmp_path / "rows"))

    def point(context: int, batch: int) -> rows.Row:
        if context == 3:
            raise RuntimeError("no memory\nand more")
        return {"ms": 1.0}

    job.measure(point)
    first, second = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert first["ms"] == 1.0 and second["refusal"] == "RuntimeError: no memory"


def test_prompts_are_the_same_for_all_and_differ_between_rows() -> None:
    one, other = rows.random_prompts(512, 7, 2)
    assert rows.random_prompts(512, 7, 2) == [one, other] and one != other


def test_vllm_speculates_as_its_options_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512, "hidden_size": 64}))
    round_ = replace(JOB, what="round", drafter="eagle3", model=str(tmp_path))
    said = vllm_engine.speculation(round_)
    assert said is not None and said["synthetic_acceptance_length"] == 3.47
    draft = json.loads((Path(said["model"]) / "config.json").read_text())
    assert (draft["num_hidden_layers"], draft["draft_vocab_size"]) == (1, 512)
    assert vllm_engine.speculation(replace(JOB, drafter=None)) is None
    said = vllm_engine.speculation(replace(JOB, drafter="eagle3"))
    assert said is not None and (said["method"], said["model"]) == ("eagle3", "folder/draft")
    with pytest.raises(ValueError, match="chains of 3 emit 1 to 4 tokens, not 5"):
        vllm_engine.speculation(replace(round_, tau=5.0))


def test_rows_of_llama_bench_and_of_our_own() -> None:
    bench_row = {"samples_ns": [3e9, 1e9, 2e9], "n_gen": 100, "n_depth": 4096}
    row = llama_cpp.bench_row(bench_row)
    assert (row["ms"], row["tokens_per_second"], row["context"]) == (20.0, 50.0, 4096)
    measured = {"shape": "tiny", "context": 7, "batch": 1, "acceptance_length": 3.4}
    measured |= {"plain_ms_per_token": 2.0, "plain_tokens_per_second": 500.0}
    measured |= {"round_ms": 3.0, "tokens_per_second": 1133.0}
    plain, round_ = ours.both(measured, "longspec")
    assert (plain["what"], plain["ms"]) == ("plain", 2.0) and "tau" not in plain
    assert (round_["what"], round_["tau"], round_["ms"]) == ("round", 3.4, 3.0)


class PagedWrapper:
    """FlashInfer's interface as documented, for one row: the library itself asks for a GPU."""

    def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool = True) -> None:
        assert layout == "NHD" and not workspace.any()

    def plan(self, *given: Any, custom_mask: Any = None, **dtypes: Any) -> None:
        *self.ends, self.table, self.last, _, _, _, self.page = given
        self.mask = custom_mask

    def run(self, q: Any, cache: Any) -> Any:
        torch = pytest.importorskip("torch")
        pages = cache[self.table[: self.ends[-1][1]]]
        assert self.page == pages.shape[2] == self.last[0]
        k, v = (pages[:, part].flatten(0, 1).transpose(0, 1) for part in (0, 1))
        mask = None if self.mask is None else self.mask.view(len(q), -1)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q.transpose(0, 1), k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("tokens", [1, 7])
def test_flashinfer_is_given_every_page_and_the_tree_s_mask(monkeypatch, tokens: int) -> None:
    torch = pytest.importorskip("torch")
    module: Any = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = PagedWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(attention, "WORKSPACE", 8)
    case = Case(tokens, heads=4, kv_heads=2, head_dim=8, context=48, batch=1, dtype="float32")
    q, caches = attention.operands(case, "cpu")
    out = attention.planned(case, "cpu")(q, caches[1])
    k, v = (caches[1][:, part].reshape(48, 2, 8).repeat_interleave(2, 1) for part in (0, 1))
    scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
    scores[:, :, -tokens:].masked_fill_(~torch.from_numpy(tree_mask(tokens)), float("-inf"))
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))


def test_ours_has_plain_steps_of_its_own_where_no_round_is_asked_for(
    tmp_path: Path, monkeypatch
) -> None:
    measured = {"shape": "tiny", "context": 7, "acceptance_length": 3.4, "round_ms": 3.0}
    measured |= {"plain_ms_per_token": 2.0, "plain_tokens_per_second": 5.0, "tokens_per_second": 9}

    def decode(arguments: argparse.Namespace) -> None:
        found = [measured | {"batch": batch} for batch in arguments.batch]
        Path(arguments.json).write_text(json.dumps({"rows": found}))

    monkeypatch.setattr(ours.decode, "main", decode)

    def whats(what: str, drafter: str | None) -> list[tuple[str, int]]:
        job = replace(JOB, what=what, drafter=drafter, shape="tiny", contexts=(7,), batches=(1, 2))
        replace(job, rows=str(tmp_path / "rows")).write(tmp_path / "job")
        (tmp_path / "rows").write_text("")
        ours.main(str(tmp_path / "job"))
        found = map(json.loads, (tmp_path / "rows").read_text().splitlines())
        return [(row["what"], row["batch"]) for row in found]

    assert whats("plain", None) == [("plain", 1), ("plain", 2)]
    assert whats("round", "eagle3") == [("round", 1), ("round", 2)]
    assert whats("round", "longspec") == [
        *(("plain", 1), ("round", 1)),
        *(("plain", 2), ("round", 2)),
    ]


def test_gpt_fast_takes_the_sizes_of_a_shape() -> None:
    given = gpt_fast.fields(SHAPES["llama3-8b"], 4200)
    assert (given["dim"], given["n_local_heads"], given["block_size"]) == (4096, 8, 4200)
    with pytest.raises(ValueError, match="heads share the model's width"):
        gpt_fast.fields(SHAPES["qwen3-4b"], 4200)


def test_a_process_that_fails_leaves_its_rows_and_nothing_that_runs(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "recorder.py").write_text(RECORDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(run.ENGINES, "fails", run.Peer("recorder", "none", (), {}))
    job = replace(JOB, rows=str(tmp_path / "rows"))
    arguments = argparse.Namespace(home=None, seconds=60)
    found = run.measured("fails", job, tmp_path, arguments)
    assert [row["ms"] for row in found] == [2.5]
    assert "fails, real, ngram: failed (3)" in capsys.readouterr().err
    child, end = int((tmp_path / "child").read_text()), time.monotonic() + 30
    while running(child):
        assert time.monotonic() < end, "what a process has started outlives its job"


def running(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_missing_peers_are_refused_in_a_sentence(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run, "gpu_line", lambda: "")
    words = ["peers", "--peer", "vllm", "--what", "plain", "--shape", "tiny"]
    assert bench.main(words) == 2
    said = capsys.readouterr().err
    assert "vllm is left out: it needs vllm, an NVIDIA GPU (--home, or installed)" in said
    assert "--peer: none of vllm can run here" in said
    assert bench.main(["peers", "--peer", "ours", "--what", "real"]) == 2
    assert "name their folder, --target" in capsys.readouterr().err
    config = run.hf_config(replace(SHAPES["tiny"], max_positions=512))
    (tmp_path / "config.json").write_text(json.dumps(config))
    real = ["peers", "--peer=ours", "--what=real", f"--target={tmp_path}", "--context=256,500"]
    assert bench.main([*real, "--new_tokens=16"]) == 2
    assert "are 516 tokens, and the target of real texts takes 512" in capsys.readouterr().err
    llama = run.ENGINES["llama.cpp"]
    assert run.lacking(llama, tmp_path, "a GPU") == ["llama-bench", "llama-server"]
    (tmp_path / "vllm" / "vllm").mkdir(parents=True)
    assert run.lacking(run.ENGINES["vllm"], tmp_path, "a GPU") == []
    assert run.paths(run.ENGINES["vllm"], tmp_path)["PYTHONPATH"].startswith(str(tmp_path))
