"""The Python interface: load a target and its draft, generate, stream, compare, look inside.

    spec = LongSpec.from_pretrained("lmsys/vicuna-7b-v1.5-16k", "sail/longspec-vicuna-7b-v1.5-16k")
    result = spec.generate("Once upon a time", max_new_tokens=128, temperature=0.7, seed=1)
    print(result.text[0], result.stats.acceptance_length)

The output depends on target, prompt, options and seed. Draft and tree change the speed alone.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from longspec_jax.arguments import (
    as_sources,
    as_tree,
    check_about_drafts,
    check_arguments,
    check_chunk,
    check_drafts,
    check_gap,
    check_offload,
    check_plan,
    refuse_pickling,
)
from longspec_jax.checks import whole_number
from longspec_jax.compilation import keep_programs
from longspec_jax.config import PLAIN, TargetConfig, TreeConfig
from longspec_jax.decoding.candidates import candidates, tallest
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.draft import Draft, drafters_of
from longspec_jax.embedded import DEMO, DEMO_DRAFTERS, demo_drafts
from longspec_jax.generation import autotune, comparison, inspection, run
from longspec_jax.generation.activity import Activity, OnActivity, Tuned
from longspec_jax.generation.autotune import may_time, start_tuned, trees_to_time
from longspec_jax.generation.call import Call, Shape, plan_memory
from longspec_jax.generation.collect import (
    RoundCollector,
    Streamer,
    collect,
    ended,
    follow,
    stream_into,
)
from longspec_jax.generation.inputs import Inputs, check_positions, to_prompts
from longspec_jax.generation.memory import (
    MemoryPlan,
    check_fits,
    check_host_fits,
    free_bytes,
    free_pinned_bytes,
)
from longspec_jax.generation.options import GenerateOptions, resolve
from longspec_jax.generation.requests import STOP_WIDTH, RequestEngine
from longspec_jax.generation.result import GenerateResult, Notices, StreamRound
from longspec_jax.generation.run import Begin, Run
from longspec_jax.generation.timings import KnownTimings
from longspec_jax.loading import check_draft_options, load_drafts, load_with_tokenizer
from longspec_jax.weights.hf import load_stop_tokens


@dataclass(frozen=True, eq=False)
class LongSpec:
    """A target, optionally its draft, and how to decode with them."""

    target_config: TargetConfig
    target_params: Any = field(repr=False)
    draft: Draft | Sequence[Draft] | None = None
    """What proposes tokens; of several a call runs the one that is fastest on this machine."""
    tokenizer: Any = field(default=None, repr=False)
    """A transformers tokenizer; without one, prompts are token ids and there is no text."""
    stop_tokens: tuple[int, ...] = ()
    """What ends a row unless ``eos_token_id`` says otherwise."""
    tree: TreeConfig | None = None
    """The tree of calls that name none; if absent the fastest on this machine, which may be
    none."""
    attention: str | None = None
    """Attention implementation; chosen automatically if absent."""
    prefill_chunk: int = 256
    """Tokens of one prefill step; more is faster on large devices and takes more memory."""
    mesh: Mesh | None = None
    """What the parameters are spread over; one device if absent."""
    row_slots: int | None = None
    """Rows that are decoded at once. The prompts of a larger batch wait, and each is prefilled,
    between the rounds of the others, for the next slot to come free. All rows at once if absent."""
    expected_tokens: int = 0
    """Of the longest prompt with its new tokens, where that is known beforehand: calls with fewer
    get caches of the same size, and need no programs of their own."""
    offload: bool = False
    """Whether the target's cache lies in the host's memory, for contexts that the device has no
    room for: two layers of it are on the device at a time, and the last one always. A pass takes as
    long as moving the cache takes (docs/retrieval.md). One device only."""
    _warm: run.WarmShapes = field(default_factory=run.WarmShapes, repr=False)
    _timings: KnownTimings = field(default_factory=KnownTimings, repr=False)
    _notices: Notices = field(default_factory=Notices, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse parts that are not what they should be, or do not belong together."""
        check_arguments(
            target_config=self.target_config,
            tokenizer=self.tokenizer,
            attention=self.attention,
            prefill_chunk=self.prefill_chunk,
            mesh=self.mesh,
            row_slots=self.row_slots,
            expected_tokens=self.expected_tokens,
            offload=self.offload,
        )
        if self.offload:
            check_offload(self.mesh, self.row_slots)
        check_chunk(self.prefill_chunk, self.target_config.max_positions)
        if self.tree is not None:
            object.__setattr__(self, "tree", as_tree(self.tree))
        check_drafts(self.drafts)
        for draft in self.drafts:
            draft.check_fits(self.target_config)
        base = getattr(self.tokenizer, "vocab_size", 0)
        if base > self.target_config.vocab_size:
            raise ValueError(
                f"the tokenizer knows {base} tokens and the target "
                f"{self.target_config.vocab_size}; "
                "load the tokenizer that belongs to this target"
            )

    __getstate__ = refuse_pickling

    @property
    def drafts(self) -> tuple[Draft, ...]:
        """All drafts; none for plain decoding."""
        if self.draft is None:
            return ()
        return tuple(self.draft) if isinstance(self.draft, Sequence) else (self.draft,)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | Sequence[str | Path] | None = None,
        *,
        draft_options: Mapping[str, Any] | None = None,
        dtype: str = "auto",
        mesh: Mesh | None = None,
        tree: TreeConfig | Sequence[int] | str | None = None,
        attention: str | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        tokenizer: Any = None,
        prefill_chunk: int | None = None,
        row_slots: int | None = None,
        offload: bool = False,
    ) -> "LongSpec":
        """Load Hugging Face checkpoints.

        Args:
          target: a folder or hub id of a Llama, Qwen2, Qwen3 or Mistral model.
          draft: what proposes tokens: a folder or hub id of a draft trained for the target, or the
            name of a kind without weights, such as ``ngram``. Of several a call runs the one that
            is fastest on this machine. Plain decoding if absent.
          draft_options: options of the draft's kind by name, such as those of
            :class:`~longspec_jax.drafters.longspec.load.LongSpecOptions`; none changes a token.
          dtype: of parameters and activations; ``auto`` is bfloat16 where the GPU has it, float16
            on older GPUs and float32 on a CPU.
          mesh: devices to spread the parameters over, from :func:`longspec_jax.make_mesh`.
          tree: shape of the draft trees of calls that name none; if absent, the fastest on this
            machine, which the first call finds out.
          attention: attention implementation; chosen automatically if absent.
          revision: branch, tag or commit of the target on the hub.
          draft_revision: the same for the draft.
          tokenizer: instead of the one beside the target.
          prefill_chunk: tokens of one prefill step; 2048 on a GPU and 256 on a CPU if absent.
          row_slots: rows that are decoded at once; those of a larger batch wait for a slot. All
            rows if absent.
          offload: keep the target's cache in the host's memory: for contexts larger than the
            device's, at the rate at which the cache is moved.
        """
        if prefill_chunk is None:
            prefill_chunk = 2048 if jax.default_backend() == "gpu" else 256
        check_arguments(
            target=target,
            draft=draft,
            draft_options=draft_options,
            dtype=dtype,
            mesh=mesh,
            attention=attention,
            revision=revision,
            draft_revision=draft_revision,
            tokenizer=tokenizer,
            prefill_chunk=prefill_chunk,
            row_slots=row_slots,
            offload=offload,
        )
        if offload:
            check_offload(mesh, row_slots)
        sources = as_sources(draft)
        check_about_drafts(sources, draft_options, draft_revision)
        tree = None if tree is None else as_tree(tree)
        keep_programs()
        stop_tokens = load_stop_tokens(target, revision=revision)
        check_draft_options(sources, draft_options or {}, draft_revision)
        loaded = load_with_tokenizer(
            target, dtype, tokenizer=tokenizer, mesh=mesh, revision=revision
        )
        drafts = load_drafts(
            sources, loaded, draft_options or {}, mesh=mesh, revision=draft_revision
        )
        return cls(
            loaded.config,
            loaded.params,
            drafts or None,
            tokenizer=loaded.tokenizer,
            stop_tokens=stop_tokens,
            tree=tree,
            attention=attention,
            prefill_chunk=prefill_chunk,
            mesh=mesh,
            row_slots=row_slots,
            offload=offload,
        )

    @classmethod
    def demo(cls, **options: Any) -> "LongSpec":
        """The small target that comes with the package, with its draft and prompt lookup.

        Options as above.

        Its dtype is float32 unless another is asked for: a model this small gains nothing from
        less, and its output is then that of plain decoding on every device.
        """
        if not (DEMO / "target").is_dir():
            raise FileNotFoundError(
                f"the demo model is missing from {DEMO}; reinstall the package, or make one with "
                "longspec-train --config=demo (python -m train.run in a checkout)"
            )
        options = {"draft": DEMO_DRAFTERS, "dtype": "float32", **options}
        options["draft"] = demo_drafts(options["draft"])
        return cls.from_pretrained(DEMO / "target", **options)

    def generate(
        self,
        inputs: Inputs,
        generation_config: Any = None,
        *,
        tree: TreeConfig | Sequence[int] | str | None = None,
        adaptive: bool = False,
        streamer: Streamer | None = None,
        on_round: Callable[[StreamRound], None] | None = None,
        on_activity: OnActivity | None = None,
        chat_template: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Complete the prompts.

        Args:
          inputs: text, chat messages or token ids; a list of them is a batch of rows, each with its
            own length.
          generation_config: a transformers ``GenerationConfig``; keyword arguments win over it.
          tree: shape of the (first) draft's trees, ``PLAIN`` for plain decoding; the object's own
            if absent, and without one the fastest on this machine, of all drafts: a few are timed
            the first time that this model decodes here, and the figures kept
            (:mod:`longspec_jax.generation.autotune`).
          adaptive: choose among this tree, a smaller one and plain decoding as the run goes, by the
            tokens per second that each turns out to emit. A draft that does not help then costs
            next to nothing. Off unless asked for: it compiles several programs instead of one, and
            where exact arithmetic does not settle a near-tie (bfloat16) the clock may.
          streamer: a transformers streamer for a single row: receives the prompt, then every
            round's tokens.
          on_round: called with what every round adds, as :meth:`stream` yields it.
          on_activity: called with what the call is doing while there is no text, one of the classes
            of :mod:`longspec_jax.generation.activity`.
          chat_template: a Jinja template for messages instead of the tokenizer's own.
          **options: see :class:`~longspec_jax.generation.options.GenerateOptions`.
        """
        check_arguments(
            adaptive=adaptive, streamer=streamer, on_round=on_round, on_activity=on_activity
        )
        with ended(streamer):
            call = self._prepare(inputs, generation_config, tree, chat_template, options, adaptive)
            if streamer is not None:
                on_round = stream_into(streamer, call.prompts, on_round)
            begin = self._beginning(call, tree, adaptive, on_activity)
            running = begin(on_round is not None)
            follow(running, self.tokenizer, on_round)
            result = collect(running, self.tokenizer)
        self._learn(running)
        return result

    def stream(
        self,
        inputs: Inputs,
        generation_config: Any = None,
        *,
        tree: TreeConfig | Sequence[int] | str | None = None,
        adaptive: bool = False,
        on_activity: OnActivity | None = None,
        chat_template: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[StreamRound, None, None]:
        """Yield what every round adds; arguments as in :meth:`generate`, and the same tokens.

        Close the generator to stop early.
        """
        check_arguments(adaptive=adaptive, on_activity=on_activity)
        call = self._prepare(inputs, generation_config, tree, chat_template, options, adaptive)
        # What is wrong with a call is said by the call, not by the first round.
        return self._rounds(self._beginning(call, tree, adaptive, on_activity))

    def _rounds(self, begin: Begin) -> Generator[StreamRound, None, None]:
        running = begin(True)
        collector = RoundCollector(running, self.tokenizer)
        with closing(running.rounds()) as rounds:
            for now in rounds:
                added = collector.add(now)
                self._notices.look_at(added.stats)
                yield added
        self._learn(running)

    def _learn(self, running: Run) -> None:
        """Warn of a draft that does not help, and correct the kept timings by a finished run."""
        self._notices.look_at(running.stats)
        self._warm.learn(running)
        autotune.correct(self._timings, running)

    def compare(
        self,
        inputs: Inputs,
        generation_config: Any = None,
        *,
        tree: TreeConfig | Sequence[int] | str | None = None,
        adaptive: bool = False,
        on_round: Callable[[StreamRound], None] | None = None,
        on_activity: OnActivity | None = None,
        chat_template: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> comparison.Comparison:
        """Decode with speculation and without, and say whether a token differs.

        Arguments as in :meth:`generate`; ``on_round`` is called with what every round of the
        speculative run adds, and has both runs go round by round. Where no tree pays and none is
        named, both are the same plain run.
        """
        check_arguments(adaptive=adaptive, on_round=on_round, on_activity=on_activity)
        call = self._prepare(inputs, generation_config, tree, chat_template, options, adaptive)
        if not call.drafter.tree.widths:
            raise ValueError(
                "nothing to compare: this call decodes plainly; load a draft and leave its tree "
                "in place"
            )
        begin = self._beginning(call, tree, adaptive, on_activity)
        compared, runs = comparison.run_both(
            begin, self._warm, self.tokenizer, on_round, on_activity
        )
        for running in dict.fromkeys(runs):
            self._learn(running)
        return compared

    def engine(
        self,
        *,
        slots: int,
        max_tokens: int,
        tree: TreeConfig | Sequence[int] | str | None = None,
        adaptive: bool = False,
        prefills: int = 1,
    ) -> RequestEngine:
        """Row slots through which requests pass: submit, step, cancel, close.

        Args:
          slots: requests that are decoded at once; others wait.
          max_tokens: most tokens of a request, prompt and new ones.
          tree: as in :meth:`generate`; the first draft's default tree for this machine if absent.
          adaptive: choose among this tree, a smaller one and plain decoding by the tokens per
            second of each.
          prefills: prompts that may be under way at once, the shortest first; each takes a row of
            memory beside the slots.

        Raises:
          MemoryError: if the slots do not fit.
        """
        for name, value in (("slots", slots), ("max_tokens", max_tokens), ("prefills", prefills)):
            whole_number(name, value)
        drafters, draft = self._drafters(tree, slots, adaptive)
        drafters = drafters if adaptive else drafters[:1]
        levels = tallest(drafters).tree.num_levels
        shape = Shape.for_call(max_tokens, 0, levels, self.prefill_chunk)
        params = Params(self.target_params, draft)
        own = [part.own_params for part in self.drafts]
        batches = [slots, *[1] * prefills]
        plan = plan_memory(self._target, drafters, params, own, batches, shape)
        check_fits(plan, free_bytes(self.mesh))
        engine = Engine(
            *(self._target, drafters, params),
            slots=slots,
            capacity=shape.capacity,
            chunk=shape.chunk,
            stop_width=STOP_WIDTH,
            prefills=prefills,
        )
        return RequestEngine(
            engine,
            self.tokenizer,
            max_tokens=max_tokens,
            max_positions=self.target_config.max_positions,
            stop_tokens=self.stop_tokens,
        )

    def inspect(
        self,
        inputs: Inputs,
        generation_config: Any = None,
        *,
        tree: TreeConfig | Sequence[int] | str | None = None,
        chat_template: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[inspection.RoundView]:
        """Yield every round's candidates beside the target's draws, for a single row.

        Shows why a token was rejected; arguments as in :meth:`generate`. Slower than
        :meth:`stream`, because every round is computed twice.
        """
        call = self._prepare(inputs, generation_config, tree, chat_template, options)
        begin = self._beginning(call, tree, False, None)
        return inspection.rounds(begin, len(call.prompts))

    def breakdown(
        self,
        inputs: Inputs,
        generation_config: Any = None,
        *,
        tree: TreeConfig | Sequence[int] | str | None = None,
        rounds: int = 32,
        chat_template: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> inspection.RoundParts:
        """Seconds of drafting, verification and commit, in a run that waits for each of them.

        Arguments as in :meth:`generate`; at most ``rounds`` of them are timed. The parts take
        longer than the rounds of :meth:`generate`, where they overlap.
        """
        whole_number("rounds", rounds)
        call = self._prepare(inputs, generation_config, tree, chat_template, options)
        return inspection.time_parts(self._beginning(call, tree, False, None), rounds)

    def score_gap(
        self,
        tokens: Sequence[int],
        plain: int,
        other: int,
        **options: Unpack[GenerateOptions],
    ) -> float | None:
        """How much plain decoding prefers one token behind a row's tokens to another.

        Args:
          tokens: of the row so far, prompt and text, at least two.
          plain: the token that plain decoding draws.
          other: one that it does not draw.
          **options: of the call; temperature, filters and seed matter.

        Returns:
          The difference of their scores, noise and temperature included: how far from a tie the
          draw was. None if filters left out one of the two.
        """
        row = check_gap(tokens, plain, other, self.target_config.vocab_size)
        call = self._prepare([row[:-1]], None, PLAIN, None, options)
        running = run.start(call, self._warm, streams=False, rounds=False)
        return comparison.score_gap(running, [row[-1]], [len(row) - 1], 0, (plain, other))

    def check(
        self,
        inputs: Inputs,
        generation_config: Any = None,
        *,
        tree: TreeConfig | Sequence[int] | str | None = None,
        adaptive: bool = False,
        chat_template: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> MemoryPlan:
        """Refuse what :meth:`generate` would refuse, and run nothing; arguments as there.

        Returns:
          What the call would take on the device.
        """
        return self._prepare(
            inputs, generation_config, tree, chat_template, options, adaptive
        ).memory

    def memory_plan(
        self,
        rows: int,
        prompt_tokens: int,
        max_new_tokens: int,
        tree: TreeConfig | Sequence[int] | str | None = None,
    ) -> MemoryPlan:
        """What :meth:`generate` takes on the device for rows of ``prompt_tokens`` tokens."""
        check_plan(rows, prompt_tokens, max_new_tokens)
        positions = self.target_config.max_positions
        check_positions([prompt_tokens], np.asarray([max_new_tokens]), positions)
        drafters, params = self._drafters(tree, rows, adaptive=False)
        drafter = tallest(drafters)
        levels = drafter.tree.num_levels
        sizes = prompt_tokens, max_new_tokens, levels, self.prefill_chunk
        shape = Shape.for_call(*sizes, self.expected_tokens)
        return self._plan(rows, shape, drafters, params)

    def _prepare(
        self,
        inputs: Inputs,
        generation_config: Any,
        tree: TreeConfig | Sequence[int] | str | None,
        chat_template: str | None,
        options: GenerateOptions,
        adaptive: bool = False,
    ) -> Call:
        """Check everything a call was given, before anything runs."""
        config = self.target_config
        prompts = to_prompts(
            inputs, self.tokenizer, config.vocab_size, chat_template, config.max_positions
        )
        lengths = [len(row) for row in prompts]
        rows = resolve(options, generation_config, lengths, self.stop_tokens, config.vocab_size)
        check_positions(lengths, rows.max_new_tokens, config.max_positions)
        drafters, draft = self._drafters(tree, len(prompts), adaptive)
        drafter = tallest(drafters)
        shape = Shape.for_call(
            max(lengths),
            int(rows.max_new_tokens.max()),
            drafter.tree.num_levels,
            self.prefill_chunk,
            self.expected_tokens,
        )
        plan = self._plan(len(prompts), shape, drafters, draft)
        check_fits(plan, free_bytes(self.mesh))
        if self.offload:
            check_host_fits(plan, free_pinned_bytes())
        target = self._target
        params = Params(self.target_params, draft)
        request = rows.request()
        return Call(target, drafters, params, prompts, request, shape, plan, self.row_slots)

    @property
    def _target(self) -> CachedTarget:
        """The static part of the target."""
        mesh = None if self.mesh is None else self.mesh.abstract_mesh
        return CachedTarget(self.target_config, self.attention, mesh, self.offload)

    def _beginning(
        self, call: Call, tree: Any, adaptive: bool, on_activity: OnActivity | None
    ) -> Begin:
        """What makes a prepared call ready to run, its drafter settled first if it is open."""
        if adaptive or len(call.drafters) == 1 and (tree is not None or self.tree is not None):
            return lambda streams: run.start(
                call, self._warm, streams=streams, on_activity=on_activity
            )

        def tell(activity: Activity) -> None:
            if isinstance(activity, Tuned):
                self._notices.look_at_timings(activity.timings)
            if on_activity:
                on_activity(activity)

        return lambda streams: start_tuned(
            call, self._warm, self._timings, streams=streams, on_activity=tell
        )

    def _drafters(
        self, tree: TreeConfig | Sequence[int] | str | None, rows: int, adaptive: bool
    ) -> tuple[tuple[Drafter, ...], Any]:
        """The drafters that may propose trees for this many rows, and their parameters."""
        chosen = self.tree if tree is None else as_tree(tree)
        if not self.drafts and tree is None:
            chosen = PLAIN
        if chosen == PLAIN:
            if adaptive:
                raise ValueError(
                    "adaptive=True has nothing to choose: this call decodes plainly; load a draft "
                    "and leave its tree in place, or drop adaptive"
                )
            return (NoDraft(),), None
        if not self.drafts:
            raise ValueError(
                f"tree {chosen} needs a draft and none is loaded; pass draft= to from_pretrained, "
                "or tree=PLAIN"
            )
        # A tree is meant for one draft, and a choice among several needs a clock.
        alone = chosen is not None or not (adaptive or may_time(self.mesh))
        drafts = self.drafts[:1] if alone else self.drafts
        together = rows if self.row_slots is None else min(rows, self.row_slots)
        trees = [
            trees_to_time(
                draft.default_trees,
                self.target_params,
                self.mesh,
                rows=together,
                others=len(drafts) > 1,
            )
            if chosen is None
            else (chosen,)
            for draft in drafts
        ]
        drafters, params = drafters_of(drafts, trees, self.attention)
        return candidates(drafters) if adaptive else drafters, params

    def _plan(self, rows: int, shape: Shape, drafters: Sequence[Drafter], draft: Any) -> MemoryPlan:
        """Bytes of a call, from shapes alone."""
        params, own = Params(self.target_params, draft), [part.own_params for part in self.drafts]
        batches = [rows]
        if self.row_slots is not None and rows > self.row_slots:
            batches = [self.row_slots, 1]  # The one being prefilled is a batch of its own.
        return plan_memory(self._target, drafters, params, own, batches, shape)
