"""A server under load: what is counted, and the load itself over a server without a model."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import serve
from benchmarks.arguments import SHAPES
from benchmarks.load import Stream, ask
from benchmarks.models import random_model
from benchmarks.rounds import acceptance_edges
from infer.serve import command
from longspec_jax import TreeConfig
from longspec_jax.config.tree import DEFAULT_TREE
from longspec_jax.decoding.target import Verification
from longspec_jax.drafters.tree import accept, add_level, root_tree
from longspec_jax.generation.result import TreeUse
from tests.infer.toys import toy_spec
from tests.serve.kit import ScriptedEngine, serving

KEYS = {
    *("shape", "context", "concurrency", "speculation", "tokens_per_second"),
    *("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "acceptance_length"),
}


class PacedEngine(ScriptedEngine):
    """A step takes 2 ms, and every step is a round of the one tree."""

    steps = 0

    def __init__(self, slots: int) -> None:
        super().__init__()
        tree = TreeConfig((1, 1, 1))
        drafter = SimpleNamespace(tree=tree, name="script", sources=("script",))
        prompts = SimpleNamespace(chunks=(32,))
        self.runner: Any = SimpleNamespace(slots=slots, drafter=drafter)
        self.engine: Any = SimpleNamespace(prompts=prompts)
        self.memory = SimpleNamespace(needed_bytes=5000)
        self.trees = [TreeUse("script", drafter.tree, 0, 0, 0.0)]

    def prepare(self) -> None:
        pass

    def step(self) -> list[Any]:
        time.sleep(0.002)
        self.steps += 1
        self.trees = [TreeUse("script", self.runner.drafter.tree, self.steps, 0, 0.0)]
        return super().step()


def test_the_command_loads_three_servers_and_writes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Of speculation and of plain decoding alike, and of a long prompt next to streams."""
    file, asked = tmp_path / "rows.json", []

    def planned(spec: Any, *, slots: int, **options: Any) -> PacedEngine:
        asked.append((bool(spec.drafts), slots, options))
        return PacedEngine(slots)

    monkeypatch.setattr(command, "planned_engine", planned)
    monkeypatch.setattr(serve, "models", lambda _: toy_spec())
    words = "serve --target=demo --context=20 --new_tokens=13 --long_context=2000 --concurrency=1,2"
    words += " --seconds=600"  # All requests begin, however slow the machine is.
    # 13 tokens are what this engine refuses: the run ends in a sentence.
    assert bench.main(words.split()) == 1
    assert "max_new_tokens=13 is unlucky" in capsys.readouterr().err
    asked.clear()
    assert bench.main([*words.replace("=13", "=16").split(), f"--json={file}"]) == 0
    limits = {"tree": TreeConfig((1, 1, 1)), "max_itl_ms": 1000.0}
    assert asked == [
        (True, 2, {"max_len": 36}),
        (False, 2, {"max_len": 36}),
        (True, 5, {"max_len": 2002, **limits}),
    ]
    *rows, gap = json.loads(file.read_text())["rows"]
    assert [(row["speculation"], row["concurrency"], row["requests"]) for row in rows] == [
        *((True, 1, 3), (True, 2, 4), (False, 1, 3), (False, 2, 4))
    ]
    for row in rows:
        assert set(row) >= KEYS and row["acceptance_length"] == 3.0
        # One token of the first step, three of each later one: six steps of 2 ms for 16 tokens.
        # A busy machine sends two steps together, so that no time between tokens has a floor.
        assert row["ttft_ms_p50"] > 2 and row["itl_ms_p99"] >= row["itl_ms_p50"] > 0
        assert row["tokens_per_second"] < row["concurrency"] * 16 / 0.012
        assert 2 <= row["rounds"]["chain:3"]
    assert gap["worst_gap_ms"] >= gap["usual_gap_ms"] > 0 and gap["chunk"] == 32
    printed = capsys.readouterr()
    assert "concurrency 2  speculation False" in printed.out and "worst_gap_ms" in printed.out
    assert "... speculation, 2 requests at a time" in printed.err


def test_a_stream_is_counted_by_its_usage() -> None:
    with serving(PacedEngine(1)) as server:
        stream = ask(server.port, [1, 2], 7)
        # Steps of 1, 3 and 3 tokens; a server that falls behind sends two of them together.
        assert sum(stream.tokens) == 7 and len(stream.arrivals) == len(stream.tokens)
        assert stream.metrics["speculative_decoding"]["mean_acceptance_length"] == 3.0
        assert stream.begun < stream.arrivals[0]
        with pytest.raises(RuntimeError, match=r"answers 400.*vocabulary"):
            ask(server.port, [1, 99], 7)


def test_times_of_tokens() -> None:
    stream = Stream(1.0, [1.5, 1.7, 2.0], [1, 2, 3])
    assert stream.first == 0.5
    assert stream.between == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])
    figures = serve.figures([stream, Stream(0.0, [1.0, 2.0], [1, 5])])
    assert figures["tokens_per_second"] == 6.0 and figures["ttft_ms_p50"] == 750


def test_the_target_agrees_as_often_as_is_drawn_along_a_path_that_the_tree_has() -> None:
    """At 4,000 positions; a node without a path to the root is never taken."""
    shape, rows = TreeConfig((2, 2)), 4000
    tree = root_tree(jnp.full(rows, 7), shape)
    tree = add_level(tree, 1, jnp.tile(jnp.asarray([[3, 4]]), (rows, 1)), jnp.zeros((rows, 2), int))
    tree = add_level(tree, 3, jnp.tile(jnp.asarray([[5, 6]]), (rows, 1)), jnp.full((rows, 2), 2))
    # Node 3 has lost its path; node 4, below node 2, is the only one of the second level.
    lost = jnp.arange(5) == 3
    mask = jnp.where(lost[:, None], jnp.eye(5, dtype=bool), tree.mask)
    depth = jnp.asarray([0, 1, 1, 2, 2])
    positions = jnp.arange(100, 100 + rows)[:, None] + depth
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 5, 11)), jnp.float32)
    edges = acceptance_edges(2.2, shape)
    run = Verification(logits, (), ())
    found = serve.agreeing(run, tree.tokens, positions, mask, edges)
    path = accept(tree, found.argmax(axis=2), 2)
    depths = np.asarray(path.count) - 1
    # Random logits draw a child by chance in a tenth of the cases where none is favoured.
    shares = np.bincount(depths, minlength=3) / rows
    assert shares[2] == pytest.approx(1 - int(edges[1]) / 2**32, abs=0.06)
    two = depths == 2
    assert {tuple(one) for one in np.asarray(path.tokens)[two][:, :2].tolist()} <= {(4, 6), (4, 5)}
    assert (np.asarray(path.tokens)[two][:, :2] == [4, 6]).all(axis=1).mean() > 0.95
    edges = acceptance_edges(3.5, DEFAULT_TREE)
    deep = serve.agreeing(run, tree.tokens, positions, mask, edges)
    assert (accept(tree, deep.argmax(axis=2), 2).count == 3).mean() > 0.5


def test_models_of_a_shape_have_a_target_that_agrees() -> None:
    config = replace(SHAPES["tiny"], dtype="bfloat16")  # Which asks what the target keeps.
    model = random_model(config)
    drawn = serve.Drawn(config, model.params.target, model.draft, acceptance=2.5)
    assert isinstance(drawn.target, serve.AgreeingTarget) and drawn.target == drawn.target
    assert drawn.target.acceptance == 2.5 and drawn.target.config == config
