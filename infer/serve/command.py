"""What ``python -m infer.serve`` does: load, plan, compile, serve, and end in order.

The port is bound before anything is loaded, so that a port in use is reported at once, and listens
when everything is compiled.
"""

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import itertools
import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax

from longspec_jax import LongSpec, TreeConfig, cli
from longspec_jax.checks import Tokenizer, shown_bytes
from longspec_jax.cli import counted
from longspec_jax.config.sampling import MOST_ALTERNATIVES
from longspec_jax.extras import missing_packages
from longspec_jax.generation.chat import template_of
from longspec_jax.generation.inputs import encode_chat, encode_text
from longspec_jax.generation.memory import free_bytes
from longspec_jax.generation.requests import RequestEngine
from longspec_jax.generation.text import stored_bytes
from longspec_jax.status_line import StatusLine

from ..arguments import models_of
from ..models import load_named, start_devices
from ..prompts import STYLES
from ..results import memory_plan_line
from ..wording import command_words
from .app import Served
from .arguments import read_template
from .calls import ChatEncoder, ServedModel
from .engine_thread import EngineThread
from .http_server import HttpServer, log_to_stderr
from .markup import Markup, markup_of
from .metrics import Metrics

PREFILLS = 4, 2, 1
"""Prompts that may be read at once: as many as fit with as many slots. Each takes as much memory
as a slot."""
MOST_SLOTS, MOST_CPU_SLOTS = 32, 4
"""Slots that are made of free memory."""
CPU_CONTEXT = 4096
"""Most tokens of a request on a CPU, where none are named: reading longer prompts takes minutes."""
COMPILED = "/jax/core/compile/backend_compile_duration"
"""What jax calls the end of a compilation."""
PROMPT = "def fibonacci(n):"
WHOLE_QUEUE = 64
"""Contexts that the prompts in the queue fill at most."""


class Service:
    """A server from its arguments to its end."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        listener: socket.socket,
        keys: tuple[str, ...] = (),
    ):
        """Begin with nothing loaded.

        Args:
          arguments: of the command, settled.
          listener: has the address.
          keys: of which clients must send one, if there are any.
        """
        self._arguments, self._listener, self._keys = arguments, listener, keys
        self._models = models_of(arguments)
        self._template = read_template(arguments)
        self.status = StatusLine(sys.stderr)
        self._spec: LongSpec | None = None
        self._engine: RequestEngine | None = None

    def load(self) -> None:
        """Load the models, plan the memory and compile everything."""
        self.status.show("starting")
        start_devices()
        spec = load_named(self._models, self.status)
        with server_words():
            engine = self._planned(spec)
        self.status.clear()
        for line in self._lines(spec, engine):
            print(line, flush=True)
        with compiling(self.status):
            engine.prepare()
        self.status.clear()
        self._spec, self._engine = spec, engine

    def _planned(self, spec: LongSpec) -> RequestEngine:
        """The engine, with the slots that are named or fit."""
        arguments = self._arguments
        most = spec.target_config.max_positions
        named = arguments.max_model_len or (CPU_CONTEXT if jax.default_backend() == "cpu" else most)
        if arguments.max_model_len is not None and named > most:
            raise ValueError(
                f"--max_model_len={named} is more than the {most} tokens that the target was made "
                "for; lower it"
            )
        self._max_len = min(named, most)
        return planned_engine(
            spec,
            max_len=self._max_len,
            slots=arguments.max_num_seqs,
            memory=arguments.gpu_memory_utilization,
            tree=arguments.tree,
            max_itl_ms=arguments.max_itl_ms,
            cpu_prefix_cache_bytes=arguments.cpu_prefix_cache_bytes or 0,
        )

    def _lines(self, spec: LongSpec, engine: RequestEngine) -> Iterator[str]:
        trees = [str(drafter.tree) for drafter in engine.runner.drafters]
        chosen = f"the fastest of {', '.join(trees)}" if len(trees) > 1 else trees[0]
        named = drafter_name(engine)
        draft = "no draft" if named is None else f"draft {named}, tree {chosen}"
        yield f"  {self._names[0]}: {draft}; {spec.precision}"
        if any(draft.shares_texts for draft in spec.drafts):
            yield "  shared=true: requests draft from each other's texts; clients can so guess them"
        yield f"  {memory_plan_line(engine.memory)}"
        free = free_bytes(spec.mesh)
        slots = counted(engine.runner.slots, "slot")
        yield f"  {slots} of {self._max_len} tokens" + (
            "" if free is None else f"; {shown_bytes(free)} are free"
        )

    @property
    def _names(self) -> tuple[str, ...]:
        named = self._arguments.served_model_name
        own = "demo" if self._models.is_demo else str(self._models.target)
        return tuple(named) if named else (own,)

    def serve(self) -> int:
        """Serve until a signal or a failure; returns the exit status."""
        served = self.served()
        log_to_stderr()
        # What was loaded and compiled stays. Python's collector would go through all of it again
        # and again, for half a second each time, in which no stream and no probe is answered.
        gc.collect()
        gc.freeze()
        server = HttpServer(served, self._listener, self._arguments.drain_seconds)
        return asyncio.run(server.run(self._announce))

    def served(self) -> Served:
        """What the routes answer with, once everything is loaded."""
        assert self._spec is not None and self._engine is not None, "loaded before"
        arguments = self._arguments
        return served_over(
            self._spec,
            self._engine,
            names=self._names,
            max_len=self._max_len,
            queue_requests=arguments.queue_requests,
            request_seconds=arguments.request_seconds,
            template=self._template,
            api_keys=self._keys,
            host=arguments.host,
            log_prompts=arguments.log_prompts,
        )

    def _announce(self) -> None:
        """One line with the address, one to type, one with the page."""
        address, port = self._listener.getsockname()[:2]
        host = f"[{address}]" if ":" in address else address
        base, key = f"http://{host}:{port}", self._keys[0] if self._keys else None
        ask = curl(base, key, self._arguments.api_key_file)
        for line in (f"ready: {base}/v1", f"try:   {ask}", f"page:  {base}/"):
            print(line, flush=True)
        if warning := open_to_all(address, key):
            cli.say(warning)


def open_to_all(address: str, key: str | None) -> str | None:
    """What to say of a server that others reach without a key; None where they do not."""
    if key is not None or ipaddress.ip_address(address).is_loopback:
        return None
    return (
        f"WARNING: there is no API key, and the server listens at {address}: whoever reaches this "
        "machine can use it. Start it with --api_key_file=FILE, or with --host=127.0.0.1"
    )


@contextlib.contextmanager
def compiling(status: StatusLine) -> Iterator[None]:
    """Show how many programs have been compiled, or read from the cache of earlier runs."""
    programs = itertools.count(1)

    def note(event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILED:
            status.show("compiling", counted(next(programs), "program"))

    status.show("compiling")
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@contextlib.contextmanager
def server_words() -> Iterator[None]:
    """Say what the library refuses within in the words of this command."""
    try:
        with command_words():
            yield
    except (MemoryError, NotImplementedError) as error:
        words = str(error).replace("max_num_seqs=", "--max_num_seqs=")
        words = words.replace("the prompt or max_new_tokens", "--max_model_len")
        raise type(error)(words) from error


def curl(base: str, key: str | None, file: Path | None = None) -> str:
    """A command that asks the server for a text, with the key from its file if that is known."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 32})
    words = ["curl", "-s", f"{base}/v1/completions", "-H", "Content-Type: application/json"]
    typed = shlex.join([*words, "-d", body])
    if key is None:
        return typed
    read = "$API_KEY" if file is None else f"$(grep -m1 . {shlex.quote(str(file))})"
    return f'{typed} -H "Authorization: Bearer {read}"'


def planned_engine(
    spec: LongSpec,
    *,
    max_len: int,
    slots: int | None = None,
    memory: float = 0.9,
    tree: TreeConfig | None = None,
    max_itl_ms: float | None = None,
    cpu_prefix_cache_bytes: int = 0,
) -> RequestEngine:
    """An engine for all that requests may ask for, with as many prompts at once as fit.

    Args:
      spec: the loaded models.
      max_len: most tokens of a request.
      slots: rows that are decoded at once; as many as fit if absent.
      memory: share of the free memory for them.
      tree: what the draft proposes; chosen by measured tokens per second if absent.
      max_itl_ms: as in :meth:`longspec_jax.LongSpec.engine`.
      cpu_prefix_cache_bytes: the same.

    Raises:
      MemoryError: if not even one slot fits.
    """
    make = partial(
        spec.engine,
        max_model_len=max_len,
        tree=tree if spec.drafts else None,
        adaptive=bool(spec.drafts) and tree is None,
        logprobs=min(MOST_ALTERNATIVES, spec.target_config.vocab_size),
        enable_penalties=True,
        return_trees=True,
        grammars=_knows_grammars(spec),
        prefixes=True,
        cpu_prefix_cache_bytes=cpu_prefix_cache_bytes,
        max_itl_ms=max_itl_ms,
    )
    limit = MOST_CPU_SLOTS if jax.default_backend() == "cpu" else MOST_SLOTS
    *more, least = PREFILLS
    for prefills in more:
        with contextlib.suppress(MemoryError):
            sized = partial(make, max_concurrent_prefills=prefills)
            fitting = slots or fitting_slots(spec, memory, limit, sized)
            if slots or fitting >= prefills:
                return sized(max_num_seqs=fitting)
    sized = partial(make, max_concurrent_prefills=least)
    return sized(max_num_seqs=slots or fitting_slots(spec, memory, limit, sized))


def served_over(
    spec: LongSpec,
    engine: RequestEngine,
    *,
    names: tuple[str, ...],
    max_len: int,
    queue_requests: int,
    request_seconds: float | None = None,
    template: str | None = None,
    api_keys: tuple[str, ...] = (),
    host: str = "",
    log_prompts: bool = False,
) -> Served:
    """What the routes answer with, over a prepared engine.

    Args:
      spec: the loaded models.
      engine: over them; driven by a thread of its own from then on.
      names: of the model.
      max_len: most tokens of a request.
      queue_requests: most rows without a first token.
      request_seconds: after which a call is ended; None for no limit.
      template: as in :func:`chat_encoder`.
      api_keys: of which clients must send one, if there are any.
      host: that requests may name where there is no key, besides addresses and private names.
      log_prompts: whether prompts are written to the log.
    """
    model = served_model(
        spec, engine, names=names, max_len=max_len, most_rows=queue_requests, template=template
    )
    levels = engine.runner.drafter.tree.num_levels
    metrics = Metrics(levels)
    thread = EngineThread(
        engine,
        metrics,
        queue_requests=queue_requests,
        queue_tokens=WHOLE_QUEUE * max_len,
        request_seconds=request_seconds,
        levels=levels,
    )
    return Served(
        model=model,
        thread=thread,
        metrics=metrics,
        slots=engine.runner.slots,
        created=int(time.time()),
        api_keys=api_keys,
        host=host,
        log_prompts=log_prompts,
    )


def served_model(
    spec: LongSpec,
    engine: RequestEngine,
    *,
    names: tuple[str, ...],
    max_len: int,
    most_rows: int,
    template: str | None = None,
) -> ServedModel:
    """What requests are checked against; arguments as in :func:`served_over`."""
    tokenizer, drafter = spec.tokenizer, engine.runner.drafter
    if tokenizer is not None:
        # The first call may change the tokenizer's own settings, during which no other thread may
        # use it ("Already borrowed").
        tokenizer("")

    def encode(text: str, special: bool) -> list[int]:
        return encode_text(tokenizer, text, special=special, max_positions=max_len)

    def decode(tokens: Sequence[int]) -> str:
        if tokenizer is None:
            return ""
        return tokenizer.decode([*tokens], clean_up_tokenization_spaces=False)

    return ServedModel(
        names=names,
        max_len=max_len,
        vocab_size=spec.target_config.vocab_size,
        stop_tokens=tuple(spec.stop_tokens),
        stored_bytes=stored_bytes(tokenizer),
        special=frozenset(getattr(tokenizer, "all_special_ids", ())),
        most_rows=most_rows,
        encode=encode,
        decode=decode,
        encode_chat=chat_encoder(tokenizer, template, max_len),
        markup=chat_markup(tokenizer, template),
        trees=tuple(use.tree for use in engine.trees),
        tree=str(drafter.tree) if drafter.tree.num_levels else None,
        drafter=drafter_name(engine),
        sources=drafter.sources,
        shared=any(draft.shares_texts for draft in spec.drafts),
        identical=spec.identical,
        grammar=spec.grammar if _knows_grammars(spec) else None,
    )


def drafter_name(engine: RequestEngine) -> str | None:
    """All that propose, also where the tallest tree is of only one; None for plain decoding.

    A tree of several drafters has the name of those that grow it.
    """
    drafter = engine.runner.drafter
    return "+".join(drafter.sources) if drafter.tree.num_levels else None


def _knows_grammars(spec: LongSpec) -> bool:
    """Whether requests may say what form their text has."""
    library = missing_packages("grammar") is None
    return library and hasattr(spec.tokenizer, "backend_tokenizer") and bool(spec.stop_tokens)


def chat_encoder(
    tokenizer: Tokenizer | None, template: str | None, max_len: int
) -> ChatEncoder | None:
    """What makes tokens of chat messages; None without a template.

    Args:
      tokenizer: of the target, or None.
      template: a name of ``STYLES``, a Jinja text, or None for the tokenizer's own.
      max_len: most tokens.
    """
    if tokenizer is None or (template is None and not getattr(tokenizer, "chat_template", None)):
        return None
    if template in STYLES:  # Which know no tools and have no variables: see chat_markup.
        style = STYLES[template]
        return lambda messages, tools, variables: style(tokenizer, messages)

    def encode(
        messages: list[dict[str, object]],
        tools: list[dict[str, object]],
        variables: Mapping[str, object],
    ) -> list[int]:
        return encode_chat(
            tokenizer,
            messages,
            template,
            tools=tools,
            variables=variables,
            max_positions=max_len,
        )

    return encode


def chat_markup(tokenizer: Tokenizer | None, template: str | None) -> Markup:
    """What the model writes around reasoning and calls; arguments as in :func:`chat_encoder`."""
    if tokenizer is None or template in STYLES:
        return Markup()
    try:
        text = template_of(tokenizer, template, [{}])
    except ValueError:  # There is none; requests that need one are refused.
        text = ""
    return markup_of(text, tokenizer.get_added_vocab(), {*tokenizer.all_special_ids})


def fitting_slots(
    spec: LongSpec, share: float, most: int, make: Callable[..., RequestEngine]
) -> int:
    """The slots that fit into a share of the free memory, at least one and at most ``most``.

    Args:
      spec: the loaded models.
      share: of the free memory.
      most: slots.
      make: makes an engine of ``max_num_seqs`` slots.

    Raises:
      MemoryError: if not even one fits.
    """
    one = make(max_num_seqs=1).memory.needed_bytes
    free = free_bytes(spec.mesh)
    if free is None or most == 1:
        return most
    try:
        each = make(max_num_seqs=2).memory.needed_bytes - one
    except MemoryError:
        return 1
    more = int(free * share - one) // max(each, 1)
    return max(1, min(most, 1 + more))
