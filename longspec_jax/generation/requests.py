"""Requests of text, messages or token ids over an engine: what a server drives.

::

    with spec.engine(max_num_seqs=4, max_model_len=4096) as engine:
        first = engine.submit("Once upon a time", max_new_tokens=64, temperature=0.8, seed=1)
        while engine.busy:
            for output in engine.step():
                print(output.id, output.text, end="", flush=True)
"""

import sys
import warnings
from collections.abc import Hashable, Sequence, Set
from dataclasses import replace
from typing import Unpack

import jax
import numpy as np

from longspec_jax.checks import GenerationConfig, is_whole, shown
from longspec_jax.config.serving import EngineOptions
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding import warmup
from longspec_jax.decoding.cache import cache_bytes
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.inflight import launch_sizes
from longspec_jax.decoding.jit_cache import PROGRAMS
from longspec_jax.decoding.prefill import most_reusable
from longspec_jax.decoding.prefixes import MOST_MOVING
from longspec_jax.decoding.report import Contents
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.runner import ModelRunner
from longspec_jax.decoding.slots import EngineStatus
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.draft import tallest
from longspec_jax.generation.call import Shape
from longspec_jax.generation.candidates import candidates_by_load, drafters_for
from longspec_jax.generation.chat import check_no_open_thought
from longspec_jax.generation.grammar import Grammar, GrammarState
from longspec_jax.generation.inputs import Batch, Inputs, is_chat, read_batch
from longspec_jax.generation.memory import check_fits, plan_memory
from longspec_jax.generation.models import Models
from longspec_jax.generation.options import GenerateOptions
from longspec_jax.generation.result import TreeUse
from longspec_jax.generation.run import tree_uses
from longspec_jax.generation.text import TextEngine
from longspec_jax.schema import read

STOP_WIDTH = 8
"""Most stop tokens of a request, unless the target itself has more."""


class RequestEngine(TextEngine):
    """Requests that come and go; made by :meth:`longspec_jax.LongSpec.engine`. A context manager.

    The text of a request depends on target, prompt, options and seed, not on its neighbours. These
    may be other people's: no request drafts from their texts, unless the draft's option ``shared``
    asks for it.
    """

    def __init__(
        self,
        models: Models,
        tree: TreeConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Make vacant slots; arguments and errors as in :meth:`longspec_jax.LongSpec.engine`."""
        given = read(EngineOptions, options, "engine()")
        slots, max_tokens = given["max_num_seqs"], given["max_model_len"]
        adaptive, prefills = given["adaptive"], given["max_concurrent_prefills"]
        prefixes, host_bytes = given["prefixes"], given["cpu_prefix_cache_bytes"]
        _check_prefixes(models, prefixes, host_bytes)
        apart = replace(models, draft=tuple(draft.apart for draft in models.drafts))
        drafters, draft = drafters_for(
            apart, tree, slots, adaptive=adaptive, choices=candidates_by_load
        )
        drafters = drafters if adaptive else drafters[:1]
        shape = Shape.for_call(
            max_tokens,
            0,
            tallest(drafters).tree.num_levels,
            models.prefill_chunk,
            alone=models.target.batch_invariant,
        )
        if prefixes:
            _say_if_nothing_is_reused(drafters[0], max_tokens, shape.chunk)
        batches = [slots, *[1] * prefills]
        adjusted, rows = given["enable_penalties"], (shape.capacity, shape.chunk)
        memory = plan_memory(models, drafters, draft, batches, *rows, adjusted=adjusted)
        if host_bytes:  # Chunks on their way to the host, and one on its way back.
            moving = (1 + MOST_MOVING) * cache_bytes(models.target_config, 1, shape.chunk)
            memory = replace(memory, working_bytes=memory.working_bytes + moving)
        check_fits(memory, models.mesh)
        self.memory = memory
        """What the engine takes on the device."""
        runner = ModelRunner(
            models.target,
            drafters,
            Params(models.target_params, draft),
            slots=slots,
            capacity=shape.capacity,
            stop_width=max(STOP_WIDTH, len(models.stop_tokens)),
            adjusted=adjusted,
            contents=Contents(given["logprobs"], trees=given["return_trees"]),
        )
        engine = Engine(
            runner,
            chunks=shape.chunks,
            prefills=prefills,
            prefixes=prefixes,
            host_bytes=host_bytes,
            readmits=True,
        )
        super().__init__(engine)
        self._max_itl_ms, self._grammars = given["max_itl_ms"], given["grammars"]
        self._pinned: Set[Hashable] = set()
        self._models = models
        self._max_tokens = min(max_tokens, models.target_config.max_positions)

    @property
    def runner(self) -> ModelRunner:
        """Its models, and the sizes of its rows."""
        return self.engine.runner

    @property
    def status(self) -> EngineStatus:
        """How many requests wait and run, and what was reused, preempted and recovered."""
        return self.engine.status

    @property
    def queued(self) -> tuple[int, ...]:
        """The requests whose prompts do not run yet, in their order."""
        return tuple(one.id for one in self.engine.prompts.queue)

    @property
    def trees(self) -> tuple[TreeUse, ...]:
        """What every candidate tree has done so far."""
        return tree_uses(self.engine)

    def submit(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig | None = None,
        *,
        chat_template: str | None = None,
        priority: int = 0,
        speculate: bool = True,
        tree: TreeConfig | None = None,
        grammar: Grammar | GrammarState | None = None,
        cache_salt: str = "",
        **options: Unpack[GenerateOptions],
    ) -> int:
        """Queue a request; the next steps prefill its prompt and decode it.

        Arguments as in :meth:`longspec_jax.LongSpec.generate`, of one row. A request of a lower
        ``priority`` goes first. Where all slots are taken it takes one of a higher ``priority``,
        whose text goes on later as if nothing had happened. Without ``speculate`` the row accepts
        no draft token, and its text is the same. A ``tree`` of :attr:`trees` runs while the request
        holds a slot, instead of the one that is fastest. A ``grammar``
        (:meth:`longspec_jax.LongSpec.grammar`) allows only what satisfies it; a ``state`` of it is
        this request's, and was compiled before. Prompts of different ``cache_salt`` are not reused
        for each other: it keeps apart people who must not learn what the others ask.

        Returns:
          The number of the request.

        Raises:
          ValueError: if the request is not one row, does not fit the engine's ``max_model_len``, or
            an option is wrong.
        """
        batch = read_batch(
            self._models,
            inputs,
            generation_config,
            options,
            chat_template=chat_template,
            max_tokens=self._max_tokens,
        )
        if len(batch.prompts) != 1:
            raise ValueError(
                f"a request is one row and {len(batch.prompts)} were given; submit each"
            )
        [prompt] = batch.prompts
        if grammar is not None and batch.tokenizer is not None and is_chat(inputs):
            check_no_open_thought(batch.tokenizer.decode, prompt.tolist())
        if not is_whole(priority):
            raise ValueError(
                f"priority={shown(priority)} must be a whole number; the lowest goes first"
            )
        if not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt={shown(cache_salt)} must be text")
        request, text = _of_one_row(batch, speculate), batch.text(0)
        id = self.engine.submit(
            prompt,
            request,
            priority=priority,
            constraint=self._constraint(grammar, request),
            candidate=None if tree is None else self._candidate(tree),
            cache_salt=cache_salt,
        )
        self.read(id, text)
        return id

    def _candidate(self, tree: TreeConfig) -> int:
        trees = [drafter.tree for drafter in self.engine.runner.drafters]
        if tree not in trees:
            known = ", ".join(map(str, trees))
            raise ValueError(f"tree={tree} is not one of this engine's trees, which are {known}")
        return trees.index(tree)

    def _constraint(
        self, grammar: Grammar | GrammarState | None, request: Request
    ) -> GrammarState | None:
        if grammar is None:
            return None
        if not self._grammars:
            raise ValueError("this engine knows no grammars; make it with grammars=True")
        if not grammar.stop_tokens <= {*request.stop_tokens[0].tolist()}:
            raise ValueError(
                f"a text of this grammar ends with token {sorted(grammar.stop_tokens)}, which "
                "eos_token_id does not name; leave out eos_token_id"
            )
        return grammar.state() if isinstance(grammar, Grammar) else grammar

    def prepare(self) -> None:
        """Compile everything before the first request, and time what ``max_itl_ms`` depends on.

        Nothing is compiled afterwards, whatever requests ask for. Timed too are the rounds of every
        candidate tree alongside 1, 2, 4 … live rows.

        Raises:
          RuntimeError: if there are requests.
        """
        engine = self.engine
        if self._pinned:
            return
        if self.busy:
            raise RuntimeError("prepare() comes before the first request; wait till all have ended")
        short: GenerateOptions = {"max_new_tokens": 2, "eos_token_id": []}
        sampled: GenerateOptions = {**short, "temperature": 1.0}
        any_other: GenerateOptions = {**short, "temperature": 1.0, "top_k": 1}
        if engine.runner.contents.logprobs is not None:
            any_other |= {"logprobs": 0, "prompt_logprobs": True}
        # One request of every kind, the slowest last.
        requests = [
            _of_one_row(read_batch(self._models, [0], None, options), speculate=True)
            for options in (short, sampled, any_other)
        ]
        # None is let go before all are there.
        with PROGRAMS.limited(sys.maxsize), PROGRAMS.noted() as used:
            self._prepare(requests)
        PROGRAMS.pin(used)
        self._pinned = used
        engine.forget()

    def _prepare(self, requests: Sequence[Request]) -> None:
        engine, slowest = self.engine, requests[-1].sampling.kind
        if self._models.mesh is None and not self._models.offload:
            # On a mesh a program's rows may be sharded otherwise than the next one's. A cache in
            # the host's memory is moved by whole layers, however few rows read it.
            engine.launch_sizes = launch_sizes(engine.runner.slots)
        if self._max_itl_ms is not None:
            chunk = warmup.largest_chunk(
                warmup.smaller_chunks(engine.prompts.chunks[-1]),
                lambda size: warmup.chunk_seconds(engine, size, requests[0]),
                warmup.longest_round(engine, slowest),
                self._max_itl_ms / 1000,
            )
            engine.prompts.take_chunks_of(chunk)
        warmup.rehearse_requests(engine, requests, constrained=self._grammars)
        if len(engine.runner.drafters) > 1:
            engine.choose_by(warmup.timed_policies(engine, slowest))

    def close(self) -> None:
        """Let go of all arrays."""
        self.engine.close()
        PROGRAMS.unpin(self._pinned)
        self._pinned = set()

    def __enter__(self) -> "RequestEngine":
        """The engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the engine."""
        self.close()


def _of_one_row(batch: Batch, speculate: bool) -> Request:
    """The options of a request."""
    return replace(batch.request, speculate=np.asarray([speculate]))


def _say_if_nothing_is_reused(drafter: Drafter, longest: int, chunk: int) -> None:
    """Warn if a drafter needs all of every prompt to be run, though prefixes may be reused."""
    if longest > chunk and not most_reusable(drafter.needs, longest, chunk):
        warnings.warn(
            "no prefix of a prompt is reused (prefixes=True): the draft reads what the target "
            "computes at every token of a prompt, so all of it is run again. With a window it "
            "reads only the last tokens: the draft option window=N, where the draft has one, with "
            f"N below {longest - chunk}, lets chunks of {chunk} tokens be reused",
            stacklevel=4,
        )


def _check_prefixes(models: Models, prefixes: bool, host_bytes: int) -> None:
    """Refuse a reuse of prefixes that is not possible."""
    if host_bytes and not prefixes:
        raise ValueError(
            "cpu_prefix_cache_bytes is about prefixes that are reused; pass prefixes=True"
        )
    if host_bytes and jax.process_count() > 1:
        raise NotImplementedError(
            "cpu_prefix_cache_bytes: the host of each process holds a part of a chunk; leave it "
            f"out in a computation of {jax.process_count()} processes"
        )
    if prefixes and models.offload:
        raise NotImplementedError(
            "prefixes: a cache in the host's memory cannot be copied from slot to slot; leave out "
            "offload, or prefixes"
        )
