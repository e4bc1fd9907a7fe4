"""The Python interface: load a target and its draft, generate, stream, compare, look inside.

    spec = LongSpec.from_pretrained("lmsys/vicuna-7b-v1.5-16k", "sail/longspec-vicuna-7b-v1.5-16k")
    result = spec.generate("Once upon a time", max_new_tokens=128, temperature=0.7, seed=1)
    print(result.text[0], result.stats.acceptance_length)

The output depends on target, prompt, options and seed. Draft and tree change only the speed.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import jax
from jax.sharding import Mesh

from longspec_jax.arguments import (
    ARGUMENTS,
    as_sources,
    as_tree,
    check_about_drafts,
    check_chunk,
    check_drafts,
    check_gap,
    refuse_beside_offload,
    refuse_pickling,
)
from longspec_jax.checks import GenerationConfig, Tokenizer, check, whole_number
from longspec_jax.compilation import keep_programs
from longspec_jax.config.loading import LoadOptions
from longspec_jax.config.serving import EngineOptions
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.batch_invariant import is_identical
from longspec_jax.embedded import DEMO_NAME, demo_drafts, demo_target
from longspec_jax.generation import comparison, inspection
from longspec_jax.generation.activity import OnActivity
from longspec_jax.generation.call import CallPlan, plan_call
from longspec_jax.generation.grammar import Grammar, compile_grammar, vocabulary_of
from longspec_jax.generation.inputs import Batch, Inputs, read_batch
from longspec_jax.generation.memory import MemoryPlan, check_fits
from longspec_jax.generation.models import Models
from longspec_jax.generation.options import CallOptions, GenerateOptions
from longspec_jax.generation.requests import RequestEngine
from longspec_jax.generation.result import (
    GenerateResult,
    Notices,
    OnRound,
    Streamer,
    StreamRound,
    ended,
    stream_into,
)
from longspec_jax.generation.run import CallCache, added_rounds, follow, learn, reads_rounds, start
from longspec_jax.generation.scores import check_host, scores_of
from longspec_jax.generation.speeds import KnownSpeeds
from longspec_jax.generation.warm import WarmShapes
from longspec_jax.loading import choose_drafts, load_with_tokenizer, with_lookup
from longspec_jax.ops.matmul.outputs_first import with_outputs_first
from longspec_jax.schema import read
from longspec_jax.weights.hf import dequantised_types, load_stop_tokens
from longspec_jax.weights.hub import local_model


@dataclass(frozen=True, eq=False, repr=False)
class LongSpec(Models):
    """A target, optionally its draft, and how to decode with them.

    The fields are those of :class:`~longspec_jax.generation.models.Models`.
    """

    _warm: WarmShapes = field(default_factory=WarmShapes)
    _speeds: KnownSpeeds = field(default_factory=KnownSpeeds)
    _notices: Notices = field(default_factory=Notices, init=False)

    def __post_init__(self) -> None:
        """Refuse parts that are not what they should be, or do not belong together."""
        names = "target_config tokenizer attention prefill_chunk mesh max_num_seqs expected_tokens"
        names += " offload batch_invariant"
        check(ARGUMENTS, **{name: getattr(self, name) for name in names.split()})
        refuse_beside_offload(self.offload, self.mesh, self.max_num_seqs)
        check_chunk(self.prefill_chunk, self.target_config.max_positions)
        if self.tree is not None:
            object.__setattr__(self, "tree", as_tree(self.tree))
        target = self.target  # Refuses kernels that are not to be had.
        check_drafts(self.drafts)
        for draft in self.drafts:
            draft.check_fits(target.config)
        base = getattr(self.tokenizer, "vocab_size", 0)
        if base > self.target_config.vocab_size:
            raise ValueError(
                f"the tokenizer knows {base} tokens and the target "
                f"{self.target_config.vocab_size}; "
                "load the tokenizer that belongs to this target"
            )

    __getstate__ = refuse_pickling

    @property
    def identical(self) -> bool:
        """Whether the output is promised to be that of plain decoding, token for token.

        It then depends only on target, prompt, options and seed: not on draft, tree, batch, slots
        or size of the cache. True in float32, and in 16 bits on Hopper GPUs with the kernels of
        ``batch_invariant``.
        """
        return is_identical(self.target)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | Sequence[str | Path] | None = None,
        *,
        draft_options: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        tree: TreeConfig | Sequence[int] | str | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Unpack[LoadOptions],
    ) -> "LongSpec":
        """Load Hugging Face checkpoints, and GGUF files.

        Args:
          target: a folder, GGUF file or hub id of a model of a family of docs/guides/targets.md, or
            the name of a small released one that is fetched once (docs/guides/gguf.md).
          draft: what proposes tokens: a folder or hub id of a draft trained for the target, or the
            name of a kind without weights, such as ``ngram``, or ``mtp`` for the layer that some
            targets carry among their own tensors. Several propose into one tree.
            Prompt lookup joins a draft with a model wherever a call's tree has space for it. The
            trees for calls without ``tree`` have it. ``4,16x4@64`` is a tree of the draft only,
            ``4,16x4@64~8`` one with lookup. Plain decoding if absent.
          draft_options: options of the draft's kind by name, such as those of
            :class:`~longspec_jax.drafters.longspec.LongSpecOptions`. Only
            ``retrieve_verify=partial`` changes tokens.
          mesh: devices to spread the parameters over, from :func:`longspec_jax.make_mesh`.
          tree: shape of the draft trees of calls that name none; if absent, the fastest on this
            machine, which calls find out as they run.
          tokenizer: instead of the one next to the target.
          **options: revisions, dtypes, kernels and where rows lie, see
            :class:`~longspec_jax.config.loading.LoadOptions`.

        Raises:
          NotImplementedError: for ``batch_invariant=True`` where there are no such kernels.
        """
        given = read(LoadOptions, options, "from_pretrained()")
        check(ARGUMENTS, target=target, draft=draft, draft_options=draft_options)
        check(ARGUMENTS, tokenizer=tokenizer, mesh=mesh)
        refuse_beside_offload(given["offload"], mesh, given["max_num_seqs"])
        sources = as_sources(draft)
        check_about_drafts(sources, draft_options, given["draft_revision"])
        tree = None if tree is None else as_tree(tree)
        keep_programs()
        stop_tokens = load_stop_tokens(target, revision=given["revision"])
        dequantised = dequantised_types(target, revision=given["revision"])
        where = local_model(target, given["revision"]) if sources else None
        chosen = choose_drafts(sources, draft_options or {}, given["draft_revision"], where)
        loaded = load_with_tokenizer(
            target,
            given["dtype"],
            tokenizer=tokenizer,
            mesh=mesh,
            revision=given["revision"],
            kv_dtype=given["kv_dtype"],
            adapter=given["adapter"],
        )
        loaded = loaded._replace(params=with_outputs_first(loaded.params, mesh))
        drafts = with_lookup(tuple(draft.load(loaded, mesh) for draft in chosen))
        usual_chunk = 2048 if jax.default_backend() == "gpu" else 256
        return cls(
            loaded.config,
            loaded.params,
            drafts or None,
            tokenizer=loaded.tokenizer,
            dequantised=dequantised,
            stop_tokens=stop_tokens,
            tree=tree,
            attention=given["attention"],
            prefill_chunk=given["prefill_chunk"] or usual_chunk,
            mesh=mesh,
            max_num_seqs=given["max_num_seqs"],
            offload=given["offload"],
            batch_invariant=given["batch_invariant"],
        )

    @classmethod
    def demo(
        cls,
        draft: str | Path | Sequence[str | Path] | None = DEMO_NAME,
        *,
        draft_options: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        tree: TreeConfig | Sequence[int] | str | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Unpack[LoadOptions],
    ) -> "LongSpec":
        """The small target that comes with the package, with its draft and prompt lookup.

        Arguments as in :meth:`from_pretrained`. The dtype is float32 unless another is named: a
        model this small gains nothing from less, and its output is then that of plain decoding on
        every device.
        """
        options.setdefault("dtype", "float32")
        return cls.from_pretrained(
            demo_target(),
            demo_drafts(draft),
            draft_options=draft_options,
            mesh=mesh,
            tree=tree,
            tokenizer=tokenizer,
            **options,
        )

    def generate(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig | None = None,
        *,
        adaptive: bool = False,
        streamer: Streamer | None = None,
        on_round: OnRound | None = None,
        on_activity: OnActivity | None = None,
        output_scores: bool = False,
        output_logits: bool = False,
        return_trees: bool = False,
        **options: Unpack[CallOptions],
    ) -> GenerateResult:
        """Complete the prompts.

        Args:
          inputs: text, chat messages or token ids; a list of them is a batch of rows, each with its
            own length.
          generation_config: a transformers ``GenerationConfig``; keyword arguments win over it.
          adaptive: choose among the call's tree, a smaller one and plain decoding as the run goes,
            by the tokens per second of each. A draft that does not help then costs next to nothing.
            It compiles several programs instead of one, and in bfloat16 the clock may decide a
            near-tie.
          streamer: a transformers streamer for a single row: receives the prompt, then every
            round's tokens.
          on_round: called with what every round adds, as :meth:`stream` yields it.
          on_activity: called with what the call is doing while there is no text, one of the classes
            of :mod:`longspec_jax.generation.activity`.
          output_scores: return what every emitted token was drawn from
            (:attr:`~longspec_jax.GenerateResult.scores`). They come from a pass over prompt and
            text of their own, after the last token, and stay in the host's memory: 4 bytes for
            each new token and each token of the vocabulary.
          output_logits: the same of the target's logits.
          return_trees: return what was verified in every round
            (:attr:`~longspec_jax.GenerateResult.trees`).
          **options: tree, chat template and generation options, see
            :class:`~longspec_jax.generation.options.CallOptions`.

        Raises:
          MemoryError: for what does not fit on the device, and scores that do not fit in the host's
            memory.
        """
        check(
            ARGUMENTS,
            adaptive=adaptive,
            streamer=streamer,
            on_round=on_round,
            on_activity=on_activity,
            output_scores=output_scores,
            output_logits=output_logits,
            return_trees=return_trees,
        )
        with nullcontext() if streamer is None else ended(streamer):
            plan, batch = self._prepare(
                inputs, generation_config, options, adaptive, return_trees=return_trees
            )
            if wanted := ["scores"] * output_scores + ["logits"] * output_logits:
                check_host(len(wanted), batch.request, plan.target.vocab_size)
            if streamer is not None:
                on_round = stream_into(streamer, batch.prompts, on_round)
            streams = reads_rounds(batch, on_round)
            run = start(plan, batch, self._known, streams=streams, on_activity=on_activity)
            result = follow(run, on_round)
            if not wanted:
                return result
            run.engine.close()  # Its cache makes room for that of a row.
            return replace(result, **scores_of(run.plan, batch, result.sequences, wanted))

    def stream(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig | None = None,
        *,
        adaptive: bool = False,
        on_activity: OnActivity | None = None,
        **options: Unpack[CallOptions],
    ) -> Generator[StreamRound, None, None]:
        """Yield what every round adds; arguments as in :meth:`generate`, and the same tokens.

        Close the generator to stop early.
        """
        check(ARGUMENTS, adaptive=adaptive, on_activity=on_activity)
        # A bad call is refused here, and not by the first round.
        plan, batch = self._prepare(inputs, generation_config, options, adaptive)
        return self._rounds(plan, batch, on_activity)

    def _rounds(
        self, plan: CallPlan, batch: Batch, on_activity: OnActivity | None
    ) -> Generator[StreamRound, None, None]:
        run = start(plan, batch, self._known, streams=True, on_activity=on_activity)
        with closing(added_rounds(run)) as rounds:
            for added in rounds:
                self._notices.look_at(added.stats)
                yield added
        learn(run, run.stats)

    def compare(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig | None = None,
        *,
        adaptive: bool = False,
        on_round: OnRound | None = None,
        on_activity: OnActivity | None = None,
        **options: Unpack[CallOptions],
    ) -> comparison.Comparison:
        """Decode with speculation and without, and say whether a token differs.

        Arguments as in :meth:`generate`; ``on_round`` is called with what every round of the
        speculative run adds, and has both runs go round by round. Where no tree pays and none is
        named, both are the same plain run.
        """
        check(ARGUMENTS, adaptive=adaptive, on_round=on_round, on_activity=on_activity)
        plan, batch = self._prepare(inputs, generation_config, options, adaptive)
        if not plan.drafter.tree.num_levels:
            raise ValueError(
                "nothing to compare: this call decodes plainly; load a draft and leave its tree "
                "in place"
            )
        streams = reads_rounds(batch, on_round)
        run = start(plan, batch, self._known, streams=streams, on_activity=on_activity)
        return comparison.run_both(run, on_round)

    def engine(
        self,
        *,
        tree: TreeConfig | Sequence[int] | str | None = None,
        **options: Unpack[EngineOptions],
    ) -> RequestEngine:
        """Row slots through which requests pass: submit, step, cancel, close.

        Args:
          tree: as in :meth:`generate`; the first draft's default tree for this machine if absent.
          **options: slots, most tokens of a request, and what requests may ask for, see
            :class:`~longspec_jax.config.serving.EngineOptions`.

        Raises:
          MemoryError: if the slots do not fit.
          NotImplementedError: for ``prefixes`` with a cache in the host's memory.
          ValueError: for a wrong value.
        """
        return RequestEngine(self, None if tree is None else as_tree(tree), **options)

    def grammar(
        self,
        *,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        lark: str | None = None,
    ) -> Grammar:
        """What the text of a request may be; see :meth:`engine`. Needs the extra ``grammar``.

        Args:
          json_schema: texts that are JSON and satisfy it; ``{"type": "object"}`` for any object.
          regex: texts that this regular expression matches whole.
          lark: texts of a context-free grammar in Lark's syntax.

        Raises:
          ValueError: if not exactly one is given, or it is too large, too deep, or wrong.
          ModuleNotFoundError: without the extra.
        """
        sizes = self.target_config.vocab_size, tuple(self.stop_tokens)
        vocabulary = vocabulary_of(self.tokenizer, *sizes)
        return compile_grammar(vocabulary, json_schema=json_schema, regex=regex, lark=lark)

    def inspect(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig | None = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[inspection.RoundView]:
        """Yield every round's candidates next to the target's draws, for a single row.

        Shows why a token was rejected; arguments as in :meth:`generate`. Slower than
        :meth:`stream`, because every round is computed twice.
        """
        plan, batch = self._prepare(inputs, generation_config, options)
        if plan.rows > 1:
            raise ValueError(f"inspect() looks at one row and {plan.rows} were given")
        fixed = partial(start, streams=True, on_activity=None, fixed=True)
        return inspection.round_views(partial(fixed, plan, batch, self._known))

    def breakdown(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig | None = None,
        *,
        rounds: int = 32,
        **options: Unpack[CallOptions],
    ) -> inspection.RoundParts:
        """Seconds of drafting, verification and commit, in a run that waits for each of them.

        Arguments as in :meth:`generate`; at most ``rounds`` of them are timed. The parts take
        longer than the rounds of :meth:`generate`, where they overlap.
        """
        whole_number("rounds", rounds)
        plan, batch = self._prepare(inputs, generation_config, options)
        run = start(plan, batch, self._known, streams=False, on_activity=None, fixed=True)
        return inspection.time_parts(run, rounds)

    def score_gap(
        self, tokens: Sequence[int], plain: int, other: int, **options: Unpack[GenerateOptions]
    ) -> float | None:
        """How much plain decoding prefers one token after a row's tokens to another.

        Args:
          tokens: of the row so far, prompt and text, at least two.
          plain: the token that plain decoding draws.
          other: one that it does not draw.
          **options: of the call; temperature, filters, biases and seed matter. Penalties count the
            last token as emitted, those before it as the prompt.

        Returns:
          The difference of their scores, noise and temperature included: how far from a tie the
          draw was. None if filters left out one of the two.
        """
        row = check_gap(tokens, plain, other, self.target_config.vocab_size)
        plan, batch = self._prepare([row[:-1]], None, {**options, "tree": PLAIN})
        run = start(plan, batch, self._known, streams=False, on_activity=None, rounds=False)
        return comparison.score_gap(run, [row[-1:]], 0, (plain, other))

    def check(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig | None = None,
        *,
        adaptive: bool = False,
        **options: Unpack[CallOptions],
    ) -> MemoryPlan:
        """Refuse what :meth:`generate` would refuse, and run nothing; arguments as there.

        Returns:
          What the call would take on the device.
        """
        plan, _ = self._prepare(inputs, generation_config, options, adaptive)
        return plan.memory

    def _prepare(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig | None,
        options: CallOptions,
        adaptive: bool = False,
        *,
        return_trees: bool = False,
    ) -> tuple[CallPlan, Batch]:
        """Read and check everything that a call was given, before anything runs."""
        given = options.copy()
        tree, template = given.pop("tree", None), given.pop("chat_template", None)
        batch = read_batch(self, inputs, generation_config, given, chat_template=template)
        tree = None if tree is None else as_tree(tree)
        plan = plan_call(self, batch, tree, adaptive=adaptive, return_trees=return_trees)
        check_fits(plan.memory, self.mesh, offload=self.offload)
        return plan, batch

    @cached_property
    def _known(self) -> CallCache:
        return CallCache(self._warm, self._speeds, self._notices)
