"""Loaded models, one way to decode with them, and a screen to show it on."""

import argparse
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

from longspec_jax import PLAIN, LongSpec, MemoryPlan, demo_prompts
from longspec_jax.cli import Closed, as_options, counted
from longspec_jax.config.sampling import GenerateOptions
from longspec_jax.drafters.base import NoDraft
from longspec_jax.generation.activity import Activity, Tuned
from longspec_jax.generation.result import StreamRound
from longspec_jax.provenance import provenance
from longspec_jax.released import RELEASED

from .arguments import models_of, row_options, sampling_options
from .output import tree_fields
from .prompts import CHATS, CODE, Prompt, encode
from .results import Outcome, as_json, header_lines, lines, memory_plan_line, tuned_line
from .screen import Screen
from .wording import command_words

DEFAULT_PROMPT = "networkx_classes_digraph"
"""More than 8000 tokens, and greedily completed by the demo model without repeating itself, which a
model this small often does and which flatters the acceptance."""
TAIL = 300
"""Characters of the prompt's end that are shown before its completion."""
COMPLETION = "--- completion ---"
"""What stands between the end of a prompt and its completion."""
NO_TEXT = "(no text: the target came without a tokenizer; --json writes the token ids)"
PAYS = (
    "python -m benchmarks decode --shape=vicuna7b --context=4096, in a checkout, shows one for "
    "which it does"
)
"""Where speculation does not pay for a model: how to see it pay on this machine."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Call:
    """One call of the library, checked: everything that can be refused has been."""

    name: str
    prompts: tuple[Prompt, ...]
    tokens: tuple[list[int], ...]
    options: GenerateOptions
    plan: MemoryPlan

    @property
    def row_names(self) -> tuple[str, ...]:
        """Where every row was written."""
        return tuple(prompt.name for prompt in self.prompts)


class Session:
    """Decodes what the arguments ask for, and prints it as it goes."""

    def __init__(self, spec: LongSpec, arguments: argparse.Namespace, out: Screen):
        self._spec, self._arguments, self._out = spec, arguments, out
        self._finished: list[Outcome] = []
        self.is_left = False
        """Set once the run is left: nothing more is printed or noted."""
        self._models = models_of(arguments)
        self._named_tree = self._models.tree if spec.drafts else None
        self._tree = self._named_tree if self._speculates else PLAIN
        """What calls run; None until it is settled."""
        self._end: str | None = None
        """What is shown of the prompt before its completion begins; None once it is."""
        names = [draft.name for draft in spec.drafts] if self._speculates else [NoDraft().name]
        self._drafter = names[0] if len(names) == 1 else None
        """The name of what proposes; None until it is settled."""
        self._notes: list[str] = []
        """Printed below the numbers of the call."""
        self._setting = self._described()

    @property
    def _speculates(self) -> bool:
        """Whether calls may use a draft."""
        return bool(self._spec.drafts) and self._named_tree != PLAIN

    def _described(self) -> dict[str, Any]:
        """What is run, for the JSON."""
        models = self._models
        return {
            "target": models.target or "demo",
            "drafts": [*models.drafts],
            "draft_options": as_options(models.draft_option),
            "draft": self._drafter,
            **tree_fields(self._tree),
            "adaptive": models.adaptive,
            "dtype": self._spec.precision,
            "identical_promised": self._spec.identical,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            **sampling_options(self._arguments),
        }

    def decode(self, named: Sequence[Prompt]) -> None:
        """Decode the prompts, or samples of the demo if none is named."""
        prompts = tuple(named) or tuple(self._samples())
        groups = [prompts] if self._arguments.batch else [(prompt,) for prompt in prompts]
        # Every call is checked before the first is printed: what can be refused is refused at once.
        try:
            calls = [self._checked(group) for group in groups]
        except ValueError as error:
            if named or self._models.is_demo:
                raise
            remedy = "name a prompt: without one the demo's document is completed"
            raise ValueError(f"{error}; {remedy}") from error
        for line in header_lines(self._setting, self._spec.target_config, self._tree):
            self._out.entry(line, indent=2)
        for call in calls:
            with command_words(of=call.name if len(calls) > 1 else ""):
                self._run(call)
        self._print_totals()

    def _samples(self) -> Iterable[Prompt]:
        if released := RELEASED.get(str(self._models.target)):
            return CHATS if released.chats else [CODE]
        samples = demo_prompts()
        if DEFAULT_PROMPT not in samples:
            raise FileNotFoundError("the demo's sample prompts are missing; reinstall the package")
        names = samples if self._arguments.all_prompts else [DEFAULT_PROMPT]
        return (Prompt(name, samples[name]) for name in names)

    def _checked(self, prompts: tuple[Prompt, ...]) -> Call:
        """A call of these rows; raises what the library would refuse."""
        tokens = tuple(map(self._encode, prompts))
        if self._arguments.batch:
            name, options = Path(self._arguments.batch).name, self._columns(prompts)
        else:
            name, options = prompts[0].name, sampling_options(self._arguments)
        with command_words([prompt.name for prompt in prompts]):
            plan = self._spec.check(
                list(tokens), tree=self._named_tree, adaptive=self._models.adaptive, **options
            )
        return Call(name, prompts, tokens, options, plan)

    def _encode(self, prompt: Prompt) -> list[int]:
        config, style = self._spec.target_config, self._arguments.prompt_style
        with command_words([prompt.name], of=prompt.name):
            tokenizer, item = self._spec.tokenizer, prompt.item
            return encode(tokenizer, config.vocab_size, item, style, config.max_positions)

    def _columns(self, rows: Sequence[Prompt]) -> GenerateOptions:
        """The options of a batch, one value per row."""
        stops = {"eos_token_id": list(self._spec.stop_tokens), "stop_strings": []}
        merged = [{**stops, **row_options(self._arguments, row)} for row in rows]
        columns = {name: [row[name] for row in merged] for name in merged[0]}
        return cast(GenerateOptions, columns)

    def _run(self, call: Call) -> None:
        """One call: what is completed, the completion, the numbers."""
        if not self._arguments.batch:
            count = counted(len(call.tokens[0]), "token")
            self._out.line(f"\n=== {call.name}: {count} === {self._out.legend()}".rstrip())
        self._out.entry(memory_plan_line(call.plan), indent=2)
        prompt = call.prompts[0].item
        self._end = None if self._arguments.batch else prompt if isinstance(prompt, str) else ""
        with _warnings() as notes:
            outcome = self._decode(call)
        self._show(outcome)
        self._note_empty(call, outcome)
        for note in (*self._notes, *notes):
            self._out.entry(f"note: {note}", indent=2)
        self._notes.clear()

    def _begin_completion(self) -> None:
        """Show the end of the prompt, if it is text, and what tells it from its completion."""
        end, self._end = self._end, None
        if end is not None:
            self._out.dim(("..." if len(end) > TAIL else "") + end[-TAIL:])
            self._out.end_line()
            self._out.line(COMPLETION)

    def _decode(self, call: Call) -> Outcome:
        """Decode, next to a plain run unless --no-compare, and keep the outcome."""
        with command_words(call.row_names):
            if self._arguments.compare is not False and self._speculates:
                compared = self._call(self._spec.compare, call)
                outcome = Outcome(call.name, call.row_names, compared.speculative, compared)
            else:
                outcome = Outcome(call.name, call.row_names, self._call(self._spec.generate, call))
        self._check_open()
        self._finished.append(outcome)
        return outcome

    def _call(self, method: Callable[..., Found], call: Call) -> Found:
        """Call the library, its rounds and activities followed."""
        self._out.status("preparing")
        return method(
            list(call.tokens),
            tree=self._named_tree,
            adaptive=self._models.adaptive,
            on_round=self._on_round,
            on_activity=self._on_activity,
            **call.options,
        )

    def _check_open(self) -> None:
        if self.is_left:
            raise Closed

    def _on_round(self, added: StreamRound) -> None:
        self._check_open()
        if self._streams:
            self._begin_completion()
            self._out.pieces(added.pieces[0])
        else:
            self._out.status("decoding", f"{sum(added.stats.new_tokens)} tokens")

    def _on_activity(self, activity: Activity) -> None:
        self._check_open()
        if isinstance(activity, Tuned):
            self._tree, self._drafter = activity.tree, activity.drafter
            self._setting.update(draft=self._drafter, **tree_fields(self._tree))
            if self._speculates:  # Else there was nothing to choose.
                self._out.entry(tuned_line(activity, PAYS), indent=2)
        self._out.activity(activity)

    @property
    def _streams(self) -> bool:
        """Whether text is shown as it comes; else when its call has ended."""
        return self._arguments.stream is not False and not self._arguments.batch

    def _show(self, outcome: Outcome) -> None:
        """Text that is not on the screen yet, and the numbers."""
        self._begin_completion()
        texts = [NO_TEXT if text is None else text for text in outcome.result.text]
        if self._arguments.batch:
            for name, text, count in zip(
                outcome.row_names, texts, outcome.stats.prompt_tokens, strict=True
            ):
                self._out.line(f"\n=== {name}: {counted(count, 'token')} ===\n{text}")
        elif not self._streams:
            self._out.line(texts[0])
        self._out.end_line()
        self._out.line()
        self._report([outcome])

    def _note_empty(self, call: Call, outcome: Outcome) -> None:
        """Say of rows that ended with their first token why there is no text."""
        limits = call.options.get("max_new_tokens", ())
        limits = [limits] if isinstance(limits, int) else limits
        ended = [
            name
            for name, limit, count in zip(
                call.row_names, limits, outcome.stats.new_tokens, strict=True
            )
            if count == 1 < limit
        ]
        if ended:
            why = "(EOS); --ignore_eos goes on past it"
            if any(call.options.get("stop_strings", ())):
                why = "(EOS, or a --stop)"
            self._out.entry(f"no text: the first token of {', '.join(ended)} ends the text {why}")

    def _print_totals(self) -> None:
        outcomes = self._finished
        if len(outcomes) > 1:
            self._out.line(f"\n=== all {len(outcomes)} prompts ===")
            self._report(outcomes)

    def _report(self, outcomes: Sequence[Outcome]) -> None:
        for line in lines(outcomes, self._spec.target_config.dtype, self._spec.identical):
            self._out.entry(line)

    def as_json(self, interrupted: bool = False) -> dict[str, Any]:
        """What was measured of the calls that have ended."""
        whole = as_json(self._finished, self._setting, interrupted)
        return {"header": provenance(self._setting["device"]), **whole}


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the library warns of meanwhile, for when the text is on the screen."""
    notes: list[str] = []
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield notes
    finally:
        for each in caught:
            if each.category is UserWarning:
                notes.append(str(each.message))
            else:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)
