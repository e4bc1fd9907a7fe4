"""Loaded models, one way to decode with them, and a screen to show it on."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longspec_jax import PLAIN, LongSpec, TreeConfig, demo_prompts

from . import prompts as prompts_lib
from .arguments import DTYPES, sampling_options
from .display import Screen
from .report import Outcome, lines, memory_plan_line

DEFAULT_PROMPT = "networkx_classes_digraph"
"""More than 8000 tokens, and greedily completed by the demo model without repeating itself, which a
model this small often does and which flatters the acceptance."""
TAIL = 300
"""Characters of the prompt's end that are shown before its completion."""


def load(arguments: argparse.Namespace) -> LongSpec:
    """The models the arguments name; the demo if they name none."""
    options: dict[str, Any] = dict(
        dtype=DTYPES.get(arguments.dtype, arguments.dtype),
        attention=arguments.attention,
        prefill_chunk=arguments.prefill_chunk,
    )
    if arguments.target is None:
        if arguments.draft is not None:
            raise ValueError(
                f"--draft={arguments.draft} needs the --target it was trained for; a draft works with "
                "no other"
            )
        return LongSpec.demo(
            **options,
            draft_vocabulary=arguments.draft_vocabulary,
            draft_int8=arguments.draft_int8,
        )
    plain = arguments.method == "plain"
    return LongSpec.from_pretrained(
        arguments.target,
        None if plain else arguments.draft,
        draft_vocabulary=None if plain else arguments.draft_vocabulary,
        draft_int8=not plain and arguments.draft_int8,
        revision=arguments.revision,
        draft_revision=arguments.draft_revision,
        **options,
    )


class Session:
    """Decodes what the arguments ask for, and prints it as it goes."""

    def __init__(
        self, spec: LongSpec, arguments: argparse.Namespace, tree: TreeConfig, out: Screen
    ):
        """Bind models, request and screen.

        Args:
          spec: the loaded models.
          arguments: of the command.
          tree: shape of the draft trees; ignored without a draft.
          out: where to print.
        """
        self._spec, self._arguments, self._out = spec, arguments, out
        self._tree = tree if spec.draft_config is not None else PLAIN
        self._options = sampling_options(arguments)

    def setting(self) -> dict[str, Any]:
        """What is run, for the JSON."""
        arguments, config = self._arguments, self._spec.target_config
        target = arguments.target or "demo"
        draft = arguments.draft or ("demo" if arguments.target is None else None)
        return {
            **{"target": target, "draft": draft, "method": arguments.method},
            **{"draft_vocabulary": arguments.draft_vocabulary},
            **{"draft_int8": arguments.draft_int8},
            **{"tree": list(self._tree.widths), "budget": self._tree.budget},
            **{"adaptive": arguments.adaptive, "dtype": config.dtype},
            **{"device": jax.devices()[0].device_kind, "jax": jax.__version__, **self._options},
        }

    def print_header(self) -> None:
        """Say what will run."""
        setting, config = self.setting(), self._spec.target_config
        draft = setting["draft"] or "none, so plain decoding (--draft names one)"
        shape = ",".join(map(str, self._tree.widths)) or "none"
        nodes = f"{self._tree.num_nodes}"
        if self._tree.selective:
            nodes = f"the best {nodes} of {self._tree.num_grown}"
        self._out.line(
            f"target {setting['target']} ({config.architecture}, {config.num_layers} layers of width "
            f"{config.model_width}), draft {draft}; {config.dtype} on {setting['device']}"
        )
        self._out.line(
            f"tree {shape} ({nodes} nodes a target pass), temperature "
            f"{setting['temperature']:g}, seed {setting['seed']}"
        )

    def decode(self) -> list[Outcome]:
        """Decode everything asked for."""
        if self._arguments.batch:
            return [self._decode_batch(self._arguments.batch)]
        # All prompts are tokenised before the first is run: bad input fails at once.
        prompts = [(name, item, self._encode(item)) for name, item in self._prompts()]
        outcomes = [self._decode_one(*prompt) for prompt in prompts]
        if len(outcomes) > 1:
            self._out.line(f"\n=== all {len(outcomes)} prompts ===")
            self._print(lines(outcomes))
        return outcomes

    def _prompts(self) -> list[tuple[str, Any]]:
        """Names and prompts, each a run of its own."""
        arguments = self._arguments
        if arguments.prompt is not None:
            return [("prompt", arguments.prompt)]
        if arguments.prompt_file:
            return [(Path(p).name, prompts_lib.read_text(p)) for p in arguments.prompt_file]
        if arguments.messages:
            return [("messages", prompts_lib.read_messages(arguments.messages))]
        samples = demo_prompts()
        if not samples:
            raise FileNotFoundError("the demo's sample prompts are missing; reinstall the package")
        return list(samples.items()) if arguments.all_prompts else [_default(samples)]

    def _encode(self, item: Any) -> list[int]:
        config, style = self._spec.target_config, self._arguments.prompt_style
        return prompts_lib.encode(self._spec.tokenizer, config.vocab_size, item, style)

    def _decode_one(self, name: str, item: Any, tokens: list[int]) -> Outcome:
        """One prompt: the end of it, its completion as it comes, the numbers."""
        self._out.line(f"\n=== {name}: {len(tokens)} tokens === {self._out.legend()}")
        self._print_plan([tokens], self._options)
        if isinstance(item, str):
            self._out.dim(("..." if len(item) > TAIL else "") + item[-TAIL:])
        streams = self._arguments.stream
        outcome = self._run(name, tokens, self._options, self._out.round if streams else None)
        self._out.line("\n" if streams else f"{outcome.result.text[0] or ''}\n")
        self._print(lines([outcome]))
        return outcome

    def _decode_batch(self, path: str) -> Outcome:
        """The rows of a file as one batch; a row's own options win over the command's."""
        items, rows = prompts_lib.read_batch(path)
        tokens = [self._encode(item) for item in items]
        merged = [{"eos_token_id": self._spec.stop_tokens, **self._options, **row} for row in rows]
        columns = {name: [row[name] for row in merged] for name in merged[0]}
        stops = columns["eos_token_id"]
        columns["eos_token_id"] = [[stop] if isinstance(stop, int) else stop for stop in stops]
        self._print_plan(tokens, columns)
        outcome = self._run(Path(path).name, tokens, columns, None)
        for row, text in enumerate(outcome.result.text):
            self._out.line(f"\n=== row {row}: {len(tokens[row])} tokens ===\n{text or ''}")
        self._out.line()
        self._print(lines([outcome]))
        return outcome

    def _print_plan(self, rows: list[list[int]], options: dict[str, Any]) -> None:
        """Say what the call will take before anything is allocated."""
        longest, new = max(map(len, rows)), int(np.max(options["max_new_tokens"]))
        plan = self._spec.memory_plan(len(rows), longest, new, self._tree)
        self._out.line(memory_plan_line(plan))

    def _run(
        self, name: str, tokens: Any, options: dict[str, Any], on_round: Callable[..., None] | None
    ) -> Outcome:
        """Decode, with the plain run beside it if it was asked for."""
        choice = {"tree": self._tree, "adaptive": self._arguments.adaptive}
        arguments: dict[str, Any] = {**choice, "on_round": on_round, **options}
        if not self._arguments.compare or not self._tree.widths:
            return Outcome(name, self._spec.generate(tokens, **arguments))
        compared = self._spec.compare(tokens, **arguments)
        return Outcome(name, compared.speculative, compared)

    def _print(self, report: Iterable[str]) -> None:
        for line in report:
            self._out.line(line)


def _default(samples: dict[str, str]) -> tuple[str, str]:
    name = DEFAULT_PROMPT if DEFAULT_PROMPT in samples else next(iter(samples))
    return name, samples[name]
