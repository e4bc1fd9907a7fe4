"""``python -m benchmarks products`` on the demo shape."""

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import products as bench_products
from benchmarks.arguments import SHAPES


@pytest.mark.parametrize(
    ("options", "stored"),
    [([], ["whole"]), (["--weights=int8"], ["int8"]), (["--weights=w4a16"], ["w4a16"])],
    ids=["16 bits", "8 bits", "4 bits"],
)
def test_rows_of_every_product(tmp_path: Path, options: list[str], stored: list[str]) -> None:
    file = tmp_path / "products.json"
    bench.main(["products", "--shape=tiny", "--rows=1", "--rows=16", f"--json={file}", *options])
    written = json.loads(file.read_text())
    assert written["header"]["roof_tb_per_s"] > 0
    found = {(row["stored"], row["product"], row["rows"]) for row in written["rows"]}
    assert found == {
        (weights, name, rows)
        for weights in stored
        for name in bench_products.ops_of(weights)
        for rows in (1, 16)
    }
    assert all(row["int8"] == (row["stored"] == "int8") for row in written["rows"])
    assert all(row["ours_microseconds"] > 0 < row["xla_microseconds"] for row in written["rows"])


def test_weights_are_those_of_a_layer() -> None:
    """Checked against the parameter count that everybody knows: 202 M a layer of a 7B Llama."""
    sizes = bench_products.weight_shapes(SHAPES["vicuna7b"])
    assert sizes["qkv"] == (4096, 12288)
    assert sizes["gate_up"] == (4096, 2, 11008)
    grouped = bench_products.weight_shapes(SHAPES["llama3-8b"])
    assert grouped["qkv"] == (4096, (32 + 2 * 8) * 128)
