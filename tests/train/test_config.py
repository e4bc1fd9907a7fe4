"""A configuration file becomes frozen dataclasses, strictly."""

from typing import Any

import pytest

from configs import demo, vicuna7b
from longspec_jax.config import LinearRopeScaling
from train.config import MeshConfig, TargetConfig, from_config


def values() -> dict[str, Any]:
    return demo.get_config("tiny").to_dict()


def test_the_run_is_frozen_hashable_and_typed() -> None:
    run = from_config(values())
    assert hash(run) == hash(from_config(values()))
    assert run.pretraining is not None and isinstance(run.pretraining.shape, TargetConfig)
    # A ConfigDict sorts its keys; stages run from short to long rows.
    assert [stage.name for stage in run.stages] == ["short", "long"]
    assert run.data.corpus is not None and run.data.corpus.held_out == ("attrs", "jinja2")
    whole = values()
    whole["optimizer"]["clip"] = 2
    assert isinstance(from_config(whole).optimizer.clip, float)


def test_nested_shapes_convert() -> None:
    nested = values()
    nested["pretraining"]["shape"]["rope_scaling"] = None
    assert from_config(nested).pretraining.shape.rope_scaling is None  # type: ignore[union-attr]
    nested["pretraining"]["shape"]["rope_scaling"] = {"factor": 2.0}
    shape = from_config(nested).pretraining.shape  # type: ignore[union-attr]
    assert shape.rope_scaling == LinearRopeScaling(2.0)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("draft.windo", 3, "config.draft has no field 'windo'; did you mean 'window'"),
        ("zzz", 3, "config has no field 'zzz'; known: seed"),
        ("seed", "x", "config.seed='x' must be of type int"),
        ("seed", True, "config.seed=True must be of type int"),
        ("seed", None, "config.seed=None must be of type int"),
        ("draft.anchor_offset", 1, "config.draft.anchor_offset=1 must be of type bool"),
        ("optimizer.b1", "0.9", "config.optimizer.b1='0.9' must be of type float"),
        ("data.corpus.held_out", (1,), "config.data.corpus.held_out=1 must be of type str"),
        ("data.max_bad_rows", -1, "max_bad_rows=-1 of the data is no number of rows; give 0 or"),
        ("stages.short.batch", 4.0, "config.stages.short.batch=4.0 must be of type int"),
    ],
)
def test_what_does_not_fit_is_refused(path: str, value: Any, sentence: str) -> None:
    whole = values()
    *parents, last = path.split(".")
    node = whole
    for parent in parents:
        node = node[parent]
    node[last] = value
    with pytest.raises(ValueError, match=sentence.replace("(", "[(]")):
        from_config(whole)


def test_a_missing_field_is_named() -> None:
    whole = values()
    del whole["draft"]["window"], whole["draft"]["init"]
    with pytest.raises(ValueError, match="config.draft lacks init, window"):
        from_config(whole)


def test_local_files_replace_hub_data() -> None:
    config = vicuna7b.get_config("short")
    assert config.data.hub
    config.data.files = "x.jsonl"
    assert from_config(config.to_dict()).data.files == "x.jsonl"


def test_one_mesh_axis_takes_what_is_left() -> None:
    assert MeshConfig(1, -1, 2).resolve(8) == (1, 4, 2)
    assert MeshConfig(2, 2, 2).resolve(8) == (2, 2, 2)
    with pytest.raises(ValueError, match="only one mesh axis may be -1"):
        MeshConfig(-1, -1, 1).resolve(8)
