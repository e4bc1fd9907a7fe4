"""From the arguments and the loaded models to what a run is made of."""

import argparse
import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax

from longspec_jax import LongSpec
from longspec_jax.generation.result import ACCEPTANCE_DEFINITION
from longspec_jax.ops.hardware import has_kernels
from longspec_jax.provenance import provenance

from . import hugging_face
from .arguments import LONGSPEC
from .decoders import Decoder, LibraryDecoder
from .methods import by_kind, settled
from .prepare import PreparedTask, Sources, Target, prepare
from .protocols import EvalProtocol, LongBenchProtocol, LongSpecProtocol
from .records import SCHEMA, Header, Setting
from .run import Plan

KEPT = (
    *("samples", "context", "min_prompt", "max_prompt", "prompt_style", "max_new_tokens"),
    *("top_p", "top_k", "ignore_eos", "revision", "draft_revision", "hub", "mesh"),
    *(
        "prefill_chunk",
        "row_slots",
        "offload",
        "attention",
        "breakdown",
        "rounds",
        "cases",
        "repetitions",
    ),
)
"""Options that a run must repeat to be continued, beside those with a field in the header."""
DEFINITIONS = {
    "acceptance_length": ACCEPTANCE_DEFINITION,
    "tokens_per_second": "tokens of the decode rounds / their seconds, each call's seconds counted "
    "once; no prefill, no compilation",
    "speedup_over_plain": "tokens per second by those of plain decoding on the same samples",
    "identical_to_plain": "every token is that of plain decoding with the same seed",
}


def decoders(
    arguments: argparse.Namespace, spec: LongSpec, target: Path, drafts: Sequence[str | Path]
) -> list[Decoder]:
    """The methods of a run, ready to decode.

    Args:
      arguments: of the command, settled.
      spec: the loaded models.
      target: folder of the target.
      drafts: folders or names of the drafts, in the order of ``spec.drafts``.

    Raises:
      ValueError: for a method without its draft, or drafts that no method can tell apart.
    """
    named = {
        kind: (str(name), source)
        for kind, name, source in zip(
            by_kind(spec.drafts), arguments.draft or (), drafts, strict=True
        )
    }
    with_torch = importlib.util.find_spec("torch") is not None and arguments.batch == 1
    options = dict(arguments.draft_option or ())
    assistant, folder = named.get("small_lm", (None, None))
    loaded = hugging_face.Loaded(
        target, spec.target_config.dtype, None if folder is None else Path(folder)
    )
    found: list[Decoder] = []
    for chosen, draft in settled(arguments.method, spec.drafts, with_torch):
        kind = chosen.method.kind
        if chosen.method.outside:
            found.append(hugging_face.decoder(chosen.name, loaded, spec.tokenizer, assistant))
        else:
            source = None if kind is None else named[kind][0]
            found.append(LibraryDecoder.of(chosen, draft, spec, source, options))
    return found


def prepared(arguments: argparse.Namespace, spec: LongSpec) -> list[PreparedTask]:
    """The prompts of all tasks."""
    config = spec.target_config
    protocol: EvalProtocol
    if arguments.protocol == LONGSPEC:
        protocol = LongSpecProtocol.of(
            spec.tokenizer, config.max_positions, arguments.min_prompt, arguments.max_prompt
        )
    else:
        protocol = LongBenchProtocol.of(
            spec.tokenizer,
            config.vocab_size,
            config.max_positions,
            arguments.prompt_style,
            arguments.max_prompt,
        )
    sources = Sources(
        dict(arguments.data or ()),
        arguments.hub,
        arguments.context,
        arguments.prompt_style,
        arguments.samples,
    )
    target = Target(spec.tokenizer, config.vocab_size, config.max_positions)
    return [
        prepare(name, sources, protocol, target, arguments.max_new_tokens)
        for name in arguments.task
    ]


def expecting(tasks: Sequence[PreparedTask], spec: LongSpec) -> LongSpec:
    """The models, with caches for the longest prompt where their size costs no time.

    Prompts of all lengths then share the programs of a method, of which each takes up to half a
    minute to compile. Where attention is the compiler's it would read the empty slots.
    """
    if spec.attention is not None or not has_kernels(spec.target_config.dtype):
        return spec
    sizes = (len(each.tokens) + each.new_tokens for task in tasks for each in task.prompts)
    longest = max(sizes, default=0)
    return replace(spec, expected_tokens=longest)


def header(
    arguments: argparse.Namespace,
    typed: Sequence[str],
    spec: LongSpec,
    methods: Mapping[str, Setting],
) -> Header:
    """Where, with what and how the run is made.

    Args:
      arguments: of the command, settled.
      typed: as they were typed.
      spec: the loaded models.
      methods: what every method runs with.
    """
    options = {name: getattr(arguments, name) for name in KEPT}
    options["data"] = {task: str(path) for task, path in arguments.data or ()}
    return Header(
        schema=SCHEMA,
        provenance=provenance(jax.devices()[0].device_kind),
        command=shlex.join(["python", "-m", "infer.eval", *typed]),
        target=arguments.target,
        dtype=spec.target_config.dtype,
        protocol=arguments.protocol,
        tasks=tuple(arguments.task),
        methods=methods,
        temperatures=tuple(arguments.temperature),
        seeds=tuple(arguments.seed),
        batch=arguments.batch,
        options=options,
        definitions=DEFINITIONS,
    )


def plan(arguments: argparse.Namespace, spec: LongSpec) -> Plan:
    """What is run, beside models and prompts."""
    return Plan(
        arguments.temperature,
        arguments.seed,
        arguments.top_k,
        arguments.top_p,
        arguments.batch,
        arguments.repetitions,
        () if arguments.ignore_eos else spec.stop_tokens,
        arguments.breakdown or 0,
        arguments.rounds or 0,
        arguments.cases,
    )
