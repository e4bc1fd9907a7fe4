"""Is the text the same with and without speculation, alone and in a batch? Token by token.

What must come out is decoded plainly first, every prompt alone, in a cache twice as large as the
others need. Every drafter and tree then decodes the same prompts: one by one, in batches, and in as
many slots through which all of them pass. Prompts have a boundary's tokens, one less and one more.
Every third one is greedy, samples at temperature 1, or samples at 1 with top-p 0.9; neighbours in a
batch differ in that.

``oracle`` is a drafter of the benchmark's own. It knows the plain text, leaves some of its tokens
out and ranks others below wrong ones, so that random weights accept long paths of large trees, too.
The exit status is 1 if a token differs although the model promises that none does.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Float, Int

from longspec_jax import PLAIN, GenerateResult, LongSpec, TreeConfig, cli, demo_prompts, make_mesh
from longspec_jax.axes import Array, Leaf
from longspec_jax.cli import counted, settled
from longspec_jax.drafters.base import Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target
from longspec_jax.drafters.ngram import NgramState, OwnTextDrafter
from longspec_jax.drafters.tree import Tree, beam_search
from longspec_jax.embedded import DEMO_NAME, DRAFTS
from longspec_jax.loading import choose_drafts

from .arguments import SHAPES, mesh_text
from .models import random_model
from .report import Report, Row, run_header
from .stored import refuse_experts
from .timing import step

SHOWN = (
    "target dtype drafter tree batch temperature top_p differing_tokens new_tokens "
    "acceptance_length"
).split()
PERIOD = 61
"""Tokens after which a prompt for random weights repeats itself."""
SAMPLINGS = ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))
"""Temperature and top-p of every third prompt."""
RISES = (6.0, 6.0, 6.0, 6.0, 6.0, 4.0, 4.0, 0.0)
"""How much the oracle raises the score of the plain text's token above those of all others, which
are drawn from a normal distribution: the best, one of several good ones, or any."""
HIERARCHY = {"retrieve": 256, "retrieve_recent": 64, "retrieve_tree": "4,4"}
Tokens = tuple[int, ...]


class Prompt(NamedTuple):
    """One of the prompts, with its options."""

    tokens: list[int]
    temperature: float
    top_p: float
    seed: int


def main(arguments: argparse.Namespace) -> int:
    """Compare every combination, print, and write the file; 1 if a promise is not kept."""
    arguments = settled(arguments, jax.default_backend() == "cpu")
    step("loading the target")
    mesh = make_mesh(**arguments.mesh) if arguments.mesh else None
    stored = arguments.target, arguments.dtype, arguments.weights
    spec = load(*stored, batch_invariant=arguments.batch_invariant, mesh=mesh)
    header = run_header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        boundaries=list(arguments.context),
        mesh=mesh_text(arguments.mesh or {}),
        identical_promised=spec.identical,
    )
    prompts = prompts_of(spec, arguments.context)
    step("plain decoding, one prompt after the other")
    roomy = max(len(prompt.tokens) for prompt in prompts) + arguments.new_tokens
    plain = dataclasses.replace(spec, draft=None, max_num_seqs=1, expected_tokens=2 * roomy)
    [(_, expected, _)] = decode(plain, prompts, PLAIN, arguments.new_tokens, [1])
    different = 0
    with Report(header, arguments.json, SHOWN) as report:
        for name, tree in cases(arguments.drafter, arguments.tree):
            drafted = dataclasses.replace(spec, draft=draft_of(name, spec, prompts, expected))
            for batch, found, acceptance in decode(
                drafted, prompts, tree, arguments.new_tokens, arguments.batch
            ):
                for row in compared(prompts, found, expected):
                    whole = {
                        "target": arguments.target,
                        "dtype": spec.precision,
                        "drafter": name,
                        "tree": str(tree),
                        **row,
                        "batch": batch,
                        "acceptance_length": acceptance,
                    }
                    different += whole["differing_tokens"]
                    report.add(whole)
    return cli.FAILED if different and spec.identical else cli.OK


def load(target: str, dtype: str, weights: str = "whole", **options: Any) -> LongSpec:
    """The demo, random weights of a known shape, or a checkpoint, without a draft.

    Args:
      target: its name.
      dtype: of weights and activations.
      weights: how random ones are stored, as in :func:`.models.random_model`.
      options: of the model: its kernels, and the mesh that it is spread over.

    Raises:
      ValueError: for a target that is stored already.
    """
    if target in SHAPES and target != "demo":
        config = dataclasses.replace(SHAPES[target], dtype=dtype)
        if weights != "whole":
            refuse_experts(config, weights)
        drawn = random_model(config, kind="ngram", weights=weights, mesh=options.get("mesh"))
        chunk = 2048 if jax.default_backend() == "gpu" else 256
        return LongSpec(config, drawn.params.target, prefill_chunk=chunk, **options)
    if weights != "whole":
        raise ValueError(f"--weights={weights} is only for random weights; {target} has its own")
    if target == "demo":
        return LongSpec.demo(draft=None, dtype=dtype, **options)
    return LongSpec.from_pretrained(target, dtype=dtype, **options)


def prompts_of(spec: LongSpec, boundaries: Sequence[int]) -> list[Prompt]:
    """Three prompts for every boundary: of its tokens, of one less, and of one more."""
    random, vocabulary = np.random.default_rng(0), spec.target_config.vocab_size
    text: list[int] = []
    if spec.tokenizer is not None:
        text = [
            token for one in demo_prompts().values() for token in spec.tokenizer(one)["input_ids"]
        ]
    found = []
    # Neighbours are of unlike length and sampling: a batch has a prompt of every boundary.
    for number, (offset, boundary) in enumerate(itertools.product((-1, 0, 1), boundaries)):
        length = boundary + offset
        if len(text) > length:
            begin = int(random.integers(0, len(text) - length))
            tokens = text[begin : begin + length]
        else:
            tokens = np.resize(random.integers(0, vocabulary, PERIOD), length).tolist()
        found.append(Prompt(tokens, *SAMPLINGS[number % len(SAMPLINGS)], number))
    return found


def cases(drafters: Sequence[str], trees: Sequence[TreeConfig]) -> Iterator[tuple[str, TreeConfig]]:
    """Every drafter with every tree; one that verifies partially has only chains."""
    for name, tree in itertools.product(drafters, trees):
        if name != "hierarchy" or set(tree.widths) == {1}:
            yield name, tree
    yield "plain", PLAIN


def draft_of(
    name: str, spec: LongSpec, prompts: Sequence[Prompt], expected: Sequence[Tokens]
) -> Draft | None:
    """A draft by its name: the oracle, one of the demo's, or whatever can be loaded."""
    if name == "plain":
        return None
    if name == "oracle":
        return OracleDraft.of([*map(_whole, prompts, expected)], spec.target_config.vocab_size)
    source = DRAFTS.get(DEMO_NAME if name == "hierarchy" else name, name)
    options: Mapping[str, Any] = HIERARCHY if name == "hierarchy" else {}
    target = Target(spec.target_config, spec.target_params, spec.tokenizer)
    [chosen] = choose_drafts([source], options)
    return chosen.load(target, spec.mesh)


def _whole(prompt: Prompt, tokens: Tokens) -> Tokens:
    return (*prompt.tokens, *tokens)


def decode(
    spec: LongSpec,
    prompts: Sequence[Prompt],
    tree: TreeConfig,
    new_tokens: int,
    batches: Sequence[int],
) -> Iterator[tuple[str, list[Tokens], float]]:
    """The prompts' tokens by every number of rows, and what a round emits.

    Several rows are decoded once in batches and once in slots.
    """
    for rows in batches:
        step(f"{spec.drafts[0].name if spec.drafts else 'plain'} {tree}, {counted(rows, 'row')}")
        groups = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
        if rows > 1:
            found = [complete(spec, group, tree, new_tokens) for group in groups]
            yield f"{rows}", *_joined(found)
        whole = complete(dataclasses.replace(spec, max_num_seqs=rows), prompts, tree, new_tokens)
        yield f"{rows} slots" if rows > 1 else "1", *_joined([whole])


def _joined(results: Sequence[GenerateResult]) -> tuple[list[Tokens], float]:
    """The tokens of all rows, and the acceptance length."""
    tokens = [row for result in results for row in result.sequences]
    passes = sum(sum(result.stats.target_passes) for result in results)
    drawn = sum(result.stats.decode_tokens for result in results)
    return tokens, round(drawn / passes, 3) if passes else 1.0


def complete(
    spec: LongSpec, prompts: Sequence[Prompt], tree: TreeConfig, new_tokens: int
) -> GenerateResult:
    """All prompts as one call."""
    return spec.generate(
        [prompt.tokens for prompt in prompts],
        tree=tree,
        max_new_tokens=new_tokens,
        temperature=[prompt.temperature for prompt in prompts],
        top_p=[prompt.top_p for prompt in prompts],
        seed=[prompt.seed for prompt in prompts],
        eos_token_id=[],
    )


def compared(
    prompts: Sequence[Prompt], found: Sequence[Tokens], expected: Sequence[Tokens]
) -> Iterator[Row]:
    """The tokens of each kind of sampling, and how many are not those of plain decoding."""
    for temperature, top_p in SAMPLINGS:
        pairs = [
            (ours, theirs)
            for prompt, ours, theirs in zip(prompts, found, expected, strict=True)
            if (prompt.temperature, prompt.top_p) == (temperature, top_p)
        ]
        yield {
            "temperature": temperature,
            "top_p": top_p,
            "new_tokens": sum(len(ours) for ours, _ in pairs),
            "differing_tokens": sum(
                one != other for pair in pairs for one, other in itertools.zip_longest(*pair)
            ),
        }


@struct.dataclass
class KnownTexts:
    """What the oracle knows."""

    texts: Leaf[Int[Array, "N L"]]
    """Prompts with what plain decoding wrote after them; padded with -1."""


@dataclass(frozen=True)
class OracleDrafter(OwnTextDrafter):
    """Proposes the continuation of the known text that a row repeats, among wrong tokens."""

    tree: TreeConfig
    vocabulary: int
    name: str = field(default="oracle", init=False)

    def propose(self, params: Params, state: NgramState, view: View, noise: SamplingNoise) -> Tree:
        """The best paths of made-up scores, in which the known text is raised."""
        rows = jnp.arange(view.pending.shape[0])
        own = state.tokens.at[rows, view.position].set(view.pending, mode="drop")
        known = params.draft.texts
        size = min(known.shape[1], own.shape[1])
        same = own[:, None, :size] == known[None, :, :size]
        same |= jnp.arange(size) > view.position[:, None, None]
        until = jnp.where(same.all(axis=2), size, jnp.argmin(same, axis=2))
        text = known[jnp.argmax(until, axis=1)]

        def score(
            memory: tuple[()], tree: Tree, nodes: slice, depth: int
        ) -> tuple[tuple[()], Float[Array, "B w V"]]:
            at = view.position + 1 + depth
            truth = jnp.take_along_axis(text, jnp.minimum(at, text.shape[1] - 1)[:, None], axis=1)
            rise = jnp.asarray(RISES)[at * 5 % len(RISES)]
            key = jax.random.key(depth)
            width = tree.tokens[:, nodes].shape[1]
            made_up = jax.random.normal(key, (1, width, self.vocabulary))
            here = jnp.arange(self.vocabulary) == truth
            return memory, made_up + (here * rise[:, None])[:, None, :]

        return beam_search(view.pending, self.tree, score, ())


@dataclass(frozen=True, eq=False)
class OracleDraft(Draft):
    """The oracle as a draft, for texts that are known beforehand."""

    vocabulary: int
    params: KnownTexts
    name: str = field(default="oracle", init=False)

    @classmethod
    def of(cls, texts: Sequence[Tokens], vocabulary: int) -> "OracleDraft":
        """For these texts."""
        known = np.full((len(texts), max(map(len, texts))), -1, np.int32)
        for row, text in zip(known, texts, strict=True):
            row[: len(text)] = text
        return cls(vocabulary, KnownTexts(jnp.asarray(known)))

    @property
    def default_trees(self) -> DefaultTrees:
        """Any; the benchmark names its trees."""
        chain = (TreeConfig((1,) * 4),)
        return DefaultTrees(chain, chain, chain)

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> OracleDrafter:
        """The drafter that grows this tree."""
        return OracleDrafter(tree, self.vocabulary)
