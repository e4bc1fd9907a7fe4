"""Which kernels every op takes on every generation of NVIDIA GPUs, found by lowering it for each.

``python -m tests.ops.gpus`` writes them to ``docs/reference/gpus.md``, with jax 0.11 or later. No
GPU is needed: jax lowers for a device of which it knows the name.
"""

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from longspec_jax.ops import hardware, layer
from longspec_jax.ops.attention import dispatch as attention
from longspec_jax.ops.attention import kernels as _  # noqa: F401
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.hardware import AMPERE, HOPPER
from longspec_jax.ops.matmul import experts, few_rows, ordered, quantised
from longspec_jax.ops.matmul.packed import pack
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.ops.recurrence.operands import RecurrentState, RecurrentTokens
from longspec_jax.ops.recurrence.recurrence import chunk_recurrence, tree_recurrence
from longspec_jax.ops.selection.continuations import best_continuations
from tests.ops.shapes import real, truth, whole

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "gpus.md"
SECTION = r"(<!-- kernels -->\n)(.*?)(<!-- end -->)"

Capability = tuple[int, int]
GPUS: dict[Capability, str] = {
    (7, 5): "Tesla T4",
    (8, 0): "NVIDIA A100",
    (8, 6): "NVIDIA A10",
    (8, 9): "NVIDIA L4",
    (9, 0): "NVIDIA H100",
    (10, 0): "NVIDIA B200",
    (12, 0): "NVIDIA RTX PRO 6000",
}
"""A GPU of every compute capability, as its driver names it."""
SHARED_KILOBYTES: dict[Capability, tuple[int, int]] = {
    (7, 5): (64, 64),
    (8, 0): (163, 164),
    (8, 6): (99, 100),
    (8, 9): (99, 100),
    (9, 0): (227, 228),
    (10, 0): (227, 228),
    (12, 0): (99, 100),
}
"""Shared memory of a program and of a multiprocessor (CUDA's guide, compute capabilities)."""
HEADS, KV_HEADS, WIDTH, MODEL_WIDTH, MLP_WIDTH, VOCABULARY = 32, 8, 128, 4096, 14336, 128256
"""Of the target: Llama-3-8B."""
SLOTS, NODES, WINDOW, CHUNK = 16384, 64, 512, 2048


class Call(NamedTuple):
    """An op and its operands."""

    op: Callable[..., Any]
    operands: tuple[Any, ...]


@contextmanager
def pretended(capability: Capability, *, triton: bool = True) -> Iterator[None]:
    """Choose kernels, and lower them, as on a GPU of this compute capability.

    Without ``triton`` Mosaic's come first, as where this jax lacked the other backend.

    What was traced for another one is forgotten. jax does not forget that of a function which was
    jitted within a trace, so the modules of kernels are imported before.
    """
    jax.clear_caches()
    with (
        patch.object(hardware, "compute_capability", lambda: capability),
        patch.object(hardware, "triton_comes_first", lambda: triton),
    ):
        if jax.__version_info__ < (0, 11):  # It lowers for any GPU alike.
            yield
            return
        from jax.experimental.mosaic.gpu import utils
        from jax.sharding import AbstractDevice

        device = AbstractDevice(device_kind=GPUS[capability], num_cores=None, platform="gpu")
        mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
        # Of a device that is not there Mosaic knows no capability.
        with (
            patch.object(utils, "_infer_arch", lambda: capability),
            jax.sharding.use_abstract_mesh(mesh),
        ):
            yield


def attention_calls(rows: Callable[..., Any]) -> dict[str, Call]:
    """Ops that attend; ``rows`` makes a shape in the target's dtype."""
    length, fresh = whole((1,)), rows((1, NODES, KV_HEADS, WIDTH))
    cached, narrow = (
        Prefix(each, each, length)
        for each in (
            rows((1, KV_HEADS, SLOTS, WIDTH)),
            jax.ShapeDtypeStruct((1, KV_HEADS, SLOTS, WIDTH), jnp.uint8),
        )
    )
    ring = rows((1, KV_HEADS, WINDOW + NODES, WIDTH))
    seen = Prefix(ring, ring, length, oldest=whole((1, NODES)))
    steps = rows((1, KV_HEADS, 256, WIDTH))
    chunk, window = rows((1, CHUNK, KV_HEADS, WIDTH)), rows((1, WINDOW + NODES, KV_HEADS, WIDTH))
    queries = {count: rows((1, count, HEADS, WIDTH)) for count in (1, 16, NODES, CHUNK)}
    node = rows((1, 1, KV_HEADS, WIDTH))
    alone = Fresh(node, node, truth((1, 1, 1)))
    tree = Fresh(fresh, fresh, truth((1, NODES, NODES)))
    recent = Fresh(window, window, truth((1, NODES, WINDOW + NODES)))
    verify, on_path = attention.speculative_attention, partial(attention.path_attention, levels=5)
    prompt = Fresh(chunk, chunk)
    return {
        "attention, a plain step": Call(verify, (queries[1], cached, alone)),
        "attention, a tree": Call(verify, (queries[NODES], cached, tree)),
        "attention, a tree, cache in 8 bits": Call(verify, (queries[NODES], narrow, tree)),
        "attention, a tree, window and soft cap": Call(
            partial(verify, cap=50.0), (queries[NODES], seen, tree)
        ),
        "attention, a tree, in one order": Call(
            on_path, (queries[NODES], cached, tree, whole((1, NODES)))
        ),
        "attention, window, cap and sinks, in one order": Call(
            partial(on_path, window=128, cap=50.0),
            (queries[NODES], Prefix(steps, steps, length), tree, whole((1, NODES)), rows((HEADS,))),
        ),
        "attention, a prompt's chunk": Call(verify, (queries[CHUNK], cached, prompt)),
        "attention, a chunk, cache in 8 bits": Call(verify, (queries[CHUNK], narrow, prompt)),
        "draft: its window": Call(attention.tree_attention, (queries[NODES], recent)),
        "draft: the target's cache": Call(attention.prefix_attention, (queries[16], cached)),
    }


def quantised_calls(rows: Callable[..., Any]) -> dict[str, Call]:
    """Matmuls with weights of 8 and 4 bits, which lie as this machine's kernel reads them."""
    eight, four, floats = (
        QuantisedMatrix(
            jax.ShapeDtypeStruct((6144, bytes_of_codes), jnp.dtype(stored)),
            real((6144, MODEL_WIDTH // (group or MODEL_WIDTH))),
            group=group,
        )
        for stored, bytes_of_codes, group in (
            ("int8", MODEL_WIDTH, 0),
            ("uint8", MODEL_WIDTH // 2, 128),
            ("float8_e4m3fn", MODEL_WIDTH, 0),
        )
    )
    matmul, few, many = quantised.quantised_matmul, rows((NODES, MODEL_WIDTH)), rows((512, 4096))

    def laid(matrix: QuantisedMatrix) -> Any:
        try:
            hardware.require_hopper("the kernel for quantised weights")
            return jax.eval_shape(partial(pack, dtype=few.dtype), matrix)
        except NotImplementedError:
            return matrix

    return {
        "weights of 8 bits, a tree": Call(matmul, (few, laid(eight))),
        "weights of 4 bits, a tree": Call(matmul, (few, laid(four))),
        "weights in FP8, a tree": Call(matmul, (few, laid(floats))),
        "weights of 8 bits, 512 rows": Call(matmul, (many, laid(eight))),
    }


def matmul_calls(rows: Callable[..., Any]) -> dict[str, Call]:
    """Matmuls with weights in 16 bits, experts among them."""
    x, mlp = rows((NODES, MODEL_WIDTH)), rows((MODEL_WIDTH, 2, MLP_WIDTH))
    of_experts = experts.ExpertWeights(rows((32, 2, 2880, 2880)), rows((32, 2880, 2880)))
    chosen = rows((NODES, 2880)), whole((NODES, 4)), of_experts, None
    return {
        "matmuls, a tree": Call(partial(few_rows.matmul, gated=True), (x, mlp)),
        "matmuls in one order": Call(partial(ordered.matmul, gated=True), (x, mlp)),
        "LM head in one order": Call(ordered.head_matmul, (x, rows((VOCABULARY, MODEL_WIDTH)))),
        "experts, a tree": Call(experts.EXPERT_MLPS, chosen),
    }


def other_calls(rows: Callable[..., Any]) -> dict[str, Call]:
    """Ops between matmuls and attention, and those that grow a tree."""
    x, cosines = rows((1, NODES, MODEL_WIDTH)), real((1, NODES, WIDTH // 2))
    heads = rows((1, NODES, KV_HEADS, HEADS // KV_HEADS + 2, WIDTH))
    cache, fresh = rows((1, KV_HEADS, SLOTS, WIDTH)), rows((1, NODES, KV_HEADS, WIDTH))
    taps = rows((16, 512, 4))
    state = RecurrentState(real((1, 16, 2, 128, 128)), rows((1, 16, 3, 512)))
    tree, chunk = (
        RecurrentTokens(rows((1, count, 16, 512)), *[real((1, count, 16, 2))] * 2)
        for count in (NODES, CHUNK)
    )
    mask, depth = truth((1, NODES, NODES)), whole((1, NODES))
    return {
        "norms": Call(
            partial(layer.residual_norm, eps=1e-5),
            (x, rows((1, *x.shape)), rows((MODEL_WIDTH,))),
        ),
        "heads and rotary": Call(layer.split_heads, (heads, cosines, cosines)),
        "appending to the cache": Call(
            layer.append_rows, ([cache], [fresh], whole((1, 6)), whole((1,)))
        ),
        "choosing continuations": Call(
            partial(best_continuations, count=16), (real((1, 16, VOCABULARY)), real((1, 16)))
        ),
        "recurrence, a tree": Call(
            partial(tree_recurrence, levels=5), (tree, taps, state, mask, depth)
        ),
        "recurrence, a prompt's chunk": Call(chunk_recurrence, (chunk, taps, state, whole((1,)))),
    }


def calls() -> dict[str, Call]:
    """What a decode step runs, in the dtype that this GPU is given."""
    capability = hardware.compute_capability() or AMPERE
    rows = partial(jax.ShapeDtypeStruct, dtype=best_dtype(capability))
    return {
        name: call
        for part in (attention_calls, matmul_calls, quantised_calls, other_calls)
        for name, call in part(rows).items()
    }


def best_dtype(capability: Capability) -> Any:
    """As :func:`longspec_jax.loading.best_dtype`, which asks a device."""
    return jnp.dtype("float16" if capability < AMPERE else "bfloat16")


def lowered(call: Call) -> Any:
    """The call for a CUDA device, not compiled."""
    op, operands = call
    return jax.jit(lambda *given: op(*given)).trace(*operands).lower(lowering_platforms=("cuda",))


def assemble_all(capability: Capability) -> None:
    """Compile every call that takes a kernel on this GPU, with Triton and without.

    Down to machine code, though such a GPU is not there. Needs the packages ``jax-cuda13-plugin``
    and ``jax-cuda13-pjrt``, and no others of CUDA.
    """
    from jax.experimental import topologies

    [device] = topologies.get_topology_desc(
        "", "cuda", target_config=_target(capability), topology="1x1x1"
    ).devices
    there = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def placed(operand: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=there)

    usual = dict[str, str]()
    for triton in (True, False):
        with pretended(capability, triton=triton):
            for name, call in calls().items():
                try:
                    program = lowered(Call(call.op, jax.tree.map(placed, call.operands)))
                except NotImplementedError:
                    continue
                found = kernels(program.as_text(), capability)
                if found not in ("XLA", usual.get(name)):
                    _assemble(program, capability)
                usual.setdefault(name, found)


def _assemble(program: Any, capability: Capability) -> None:
    """Compile a lowered program, unless the same compiler has done so before.

    jax does not read what it keeps for GPUs that are not there. So that a program compiled is noted
    besides those that it keeps.
    """
    plugin = version("jax-cuda13-plugin")
    facts = program.as_text(), _target(capability), jax.lib.__version__, plugin
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "assembled"
    note = folder / hashlib.sha256("".join(facts).encode()).hexdigest()
    if not note.exists():
        program.compile()
        folder.mkdir(parents=True, exist_ok=True)
        note.touch()


def _target(capability: Capability) -> str:
    """What XLA must know of a GPU, in the text form of its protocol buffer."""
    (major, minor), (program, core) = capability, SHARED_KILOBYTES[capability]
    # Mosaic writes for all instructions of a generation, as such a GPU has them.
    extension = "feature_extension: ACCELERATED_FEATURES" if capability >= HOPPER else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {program << 10}
  shared_memory_per_core: {core << 10}
  threads_per_core_limit: 1536
  core_count: 108
  fpus_per_core: 128
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {10**12}
  l2_cache_size: {40 << 20}
  clock_rate_ghz: 1.5
  device_memory_size: {24 << 30}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{GPUS[capability]}"
"""


def kernels(text: str, capability: Capability) -> str:
    """The backends of a lowered program's kernels, by the names that the page explains."""
    targets = set(re.findall(r"custom_call @([\w$.]*(?:triton|mosaic)[\w$.]*)", text))
    mosaic = "Hopper" if capability[0] == HOPPER[0] else "Ampere"
    found = {mosaic if "mosaic" in target else "Triton" for target in targets}
    return " + ".join(sorted(found)) or "XLA"


@functools.cache
def taken(capability: Capability, *, triton: bool = True) -> Mapping[str, str]:
    """The kernels of every call on a GPU; a dash where it is refused."""
    found = {}
    with pretended(capability, triton=triton):
        for name, call in calls().items():
            try:
                found[name] = kernels(lowered(call).as_text(), capability)
            except NotImplementedError:
                found[name] = "–"
    return found


def documented() -> dict[Capability, dict[str, str]]:
    """What the page says of this environment's jax: its table, and what follows for jax 0.10."""
    found = re.search(SECTION, PAGE.read_text(), re.DOTALL)
    assert found, PAGE.name
    header, rule, *lines = (line.strip("| \n").split(" | ") for line in found[2].splitlines())
    assert rule and header[1:] == [f"{major}.{minor}" for major, minor in GPUS]
    page = dict(zip(GPUS, ({row[0]: row[n] for row in lines} for n in range(1, 8)), strict=True))
    if jax.__version_info__ >= (0, 11):
        return page
    without_mosaic = {
        name: kernels if kernels != "Ampere" else "–" if "attention" in name else "XLA"
        for name, kernels in page[AMPERE].items()
    }
    return {gpu: page[gpu] if gpu < AMPERE else without_mosaic for gpu in GPUS}


def table() -> str:
    """What the jax of this environment takes, as the page's table."""
    columns = {gpu: taken(gpu) for gpu in GPUS}
    header = "| op | " + " | ".join(f"{major}.{minor}" for major, minor in columns) + " |"
    rows = [
        f"| {name} | " + " | ".join(column[name] for column in columns.values()) + " |"
        for name in columns[HOPPER]
    ]
    return "\n".join([header, "|---" * (len(columns) + 1) + "|", *rows]) + "\n"


if __name__ == "__main__":
    if jax.__version_info__ < (0, 11):
        raise SystemExit(f"jax is {jax.__version__}: the page's table is that of 0.11 and later")
    page = PAGE.read_text()
    PAGE.write_text(re.sub(SECTION, lambda m: m[1] + table() + m[3], page, flags=re.DOTALL))
