"""The script of docs/guides/serving.md, run as it stands on the toy instead of the demo."""

import re
from pathlib import Path

import pytest

from longspec_jax import PLAIN, LongSpec
from tests.infer.toys import toy_spec

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "serving.md"
FOR_THE_TOY = {
    r'"def fibonacci(n):\n"': '"ab cd"',
    "max_model_len=512": "max_model_len=64",
    "temperature=0.7": "max_new_tokens=9, temperature=0.7",
}


@pytest.mark.full
def test_the_script_serves_what_calls_of_their_own_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = toy_spec()
    monkeypatch.setattr(LongSpec, "demo", lambda: spec)
    scripts = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [script] = (each for each in scripts if "LongSpec" in each)
    for old, new in FOR_THE_TOY.items():
        assert old in script
        script = script.replace(old, new)
    found: dict = {}
    exec(compile(script, str(PAGE), "exec"), found)
    options = {"max_new_tokens": 9, "temperature": 0.7, "seed": [*range(8)]}
    alone = spec.generate(["ab cd"] * 8, tree=PLAIN, **options).text
    assert [*found["texts"].values()] == [*alone] and len(set(alone)) > 1
