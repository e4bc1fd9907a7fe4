"""What quantised weights change: the target's choices, its perplexity, and what a draft is worth.

Texts are the beginnings of the demo's prompts, which its training did not see. In one forward over
each, every next token is scored: ``changed_percent`` of them have another most likely token than by
the whole weights, and ``perplexity`` is of the tokens that come. Then each target continues the
texts at temperature 0: ``changed_texts`` counts those that are not the whole target's to the end,
and ``acceptance_length`` is of the same draft and tree. ``fp8`` and ``w4a16`` are made from the
target for the run, other checkpoints of it are named by ``--quantised``.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from contrib.quantise import FORMATS, quantise
from longspec_jax import LongSpec, demo_prompts
from longspec_jax.axes import Array
from longspec_jax.cli import settled
from longspec_jax.config.target import TargetConfig
from longspec_jax.embedded import DEMO_NAME, demo_drafts, demo_target
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.reference import causal_attention
from longspec_jax.ops.placement import tree_bytes

from .report import Report, run_header
from .timing import step

SHOWN = (
    "target weights target_bytes perplexity changed_percent tokens changed_texts texts "
    "acceptance_length"
).split()


def main(arguments: argparse.Namespace) -> None:
    """Measure the whole target and its quantised copies, print, and write the file."""
    arguments = settled(arguments, jax.default_backend() == "cpu")
    device = jax.devices()[0].device_kind
    header = run_header(device, __doc__ or "", draft=arguments.draft, tree=str(arguments.tree))
    expected: tuple[np.ndarray, Sequence[Any]] | None = None
    with (
        Report(header, arguments.json, SHOWN) as report,
        tempfile.TemporaryDirectory() as folder,
    ):
        for source in sources(arguments, Path(folder)):
            step(f"measuring {source}")
            spec = LongSpec.from_pretrained(
                source, demo_drafts(arguments.draft), dtype=arguments.dtype
            )
            texts = [_beginning(spec, text, arguments.context) for text in demo_prompts().values()]
            best, loss = scored(spec.target_config, spec.target_params, jnp.asarray(texts))
            result = spec.generate(
                texts,
                tree=arguments.tree,
                max_new_tokens=arguments.new_tokens,
                temperature=0,
                eos_token_id=[],
            )
            found = np.asarray(best), result.sequences
            expected = expected or found
            passes = sum(result.stats.target_passes)
            row = {
                "target": arguments.target,
                "weights": spec.precision,
                "target_bytes": tree_bytes(spec.target_params),
                "tokens": int(found[0].size),
                "perplexity": round(float(np.exp(loss)), 4),
                "changed_percent": round(100 * float((found[0] != expected[0]).mean()), 3),
                "texts": len(texts),
                "changed_texts": sum(
                    one != other for one, other in zip(found[1], expected[1], strict=True)
                ),
                "new_tokens": arguments.new_tokens,
                "acceptance_length": round(result.stats.decode_tokens / passes, 3),
            }
            report.add(row)


def sources(arguments: argparse.Namespace, folder: Path) -> Iterator[Path | str]:
    """The whole target, then its quantised copies."""
    target = demo_target() if arguments.target == DEMO_NAME else arguments.target
    yield target
    if arguments.quantised:
        yield from arguments.quantised
        return
    for format in FORMATS:
        quantise(target, format, folder / format)
        yield folder / format


def _beginning(spec: LongSpec, text: str, length: int) -> list[int]:
    """The first tokens of a text."""
    if spec.tokenizer is None:
        raise ValueError("the target has no tokenizer, which the texts need; add it to its folder")
    tokens = spec.tokenizer(text)["input_ids"][:length]
    if len(tokens) < length:
        raise ValueError(f"a text has {len(tokens)} tokens; pass --context={len(tokens)} or less")
    return tokens


def scored(
    config: TargetConfig, params: Any, tokens: Int[Array, "B T"]
) -> tuple[Int[Array, "B T"], Float[Array, ""]]:
    """The most likely token behind every prefix, and the mean loss of the tokens that come."""
    best, losses = zip(*(_scored_row(config, params, row[None]) for row in tokens), strict=True)
    return jnp.concatenate(best), jnp.stack(losses).mean()


@partial(jax.jit, static_argnums=0)
def _scored_row(config: TargetConfig, params: Any, tokens: Array) -> tuple[Array, Array]:
    model, positions = Target(config), jnp.arange(tokens.shape[1])[None]
    variables = {"params": params}

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        return causal_attention(q, k, v)

    output: Any = model.apply(variables, tokens, positions, attend)
    logits: Any = model.apply(variables, output.hidden, method="unembed")
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    losses = -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)
    return jnp.argmax(logits, axis=2), losses.mean()
