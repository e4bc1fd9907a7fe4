"""Hugging Face transformers' own ``generate``, as a method beside ours.

The same checkpoint, dtype and prompts; one row at a time. A pass is a call of the target's forward,
counted by a hook, and the tokens that it yields are what a streamer is handed. The clock stops when
the device is done. Where a draft proposes from the first pass on (prompt lookup, assisted), that
pass may yield several tokens; it counts as the prefill all the same.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspec_jax.generation.activity import OnActivity

from .decoders import Decoded, DecodedGroup, Request
from .records import Breakdown, RoundTree, Setting

LOOKUP_TOKENS = 10
"""Most tokens that prompt lookup proposes in a round: what transformers' documentation uses."""


class Loaded:
    """Models of PyTorch, loaded when the first of the methods needs them."""

    def __init__(self, target: Path, dtype: str, assistant: Path | None):
        """Name what will be loaded.

        Args:
          target: folder of the target.
          dtype: of parameters and activations.
          assistant: folder of a small language model; None for none.
        """
        self._folders = {"target": target, "assistant": assistant}
        self._dtype = dtype
        self._models: dict[str, Any] = {}

    def model(self, which: str) -> Any:
        """The ``target``, or the ``assistant``."""
        if which not in self._models:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.disable_progress_bar()  # There is one of ours.
            device = "cuda" if torch.cuda.is_available() else "cpu"
            model: Any = AutoModelForCausalLM.from_pretrained(
                self._folders[which], dtype=getattr(torch, self._dtype), attn_implementation="sdpa"
            )
            self._models[which] = model.to(device).eval()
        return self._models[which]


@dataclass
class _Passes:
    """What a call of ``generate`` does, as it is done."""

    begins: list[float] = field(default_factory=list)
    """Clock at the beginning of every pass of the target."""
    put: list[int] = field(default_factory=list)
    """Tokens that the streamer was handed, the prompt's first."""

    def begin(self, *_: Any) -> None:
        """A pass of the target begins."""
        self.begins.append(time.perf_counter())

    def end(self) -> None:
        """The text has ended; what transformers calls at the end of a stream."""

    def handed(self, value: Any) -> None:
        """Tokens have been emitted."""
        self.put.append(int(value.numel()))


class _Streamer:
    """A streamer that counts."""

    def __init__(self, passes: _Passes):
        self.put, self.end = passes.handed, passes.end


@dataclass(frozen=True)
class HuggingFaceDecoder:
    """One way that transformers decodes."""

    name: str
    setting: Setting
    loaded: Loaded
    tokenizer: Any
    lookup: int | None = None
    """Tokens that prompt lookup proposes; None for none."""
    assisted: bool = False

    def decode(
        self, prompts: Sequence[list[int]], request: Request, on_activity: OnActivity
    ) -> DecodedGroup:
        """Decode a group of one row.

        Raises:
          ValueError: for a group of several.
        """
        if len(prompts) > 1:
            raise ValueError(
                f"--method={self.name} decodes one row at a time, as transformers' speculation "
                f"does, and --batch={len(prompts)} asks for more; leave one of the two out"
            )
        import torch

        model = self.loaded.model("target")
        tokens = torch.tensor([prompts[0]], device=model.device)
        drawing: dict[str, Any] = {"do_sample": False}
        if request.temperature > 0:
            torch.manual_seed(request.seed)
            drawing = {
                "do_sample": True,
                "temperature": request.temperature,
                "top_k": request.top_k,
                "top_p": request.top_p,
            }
        drafting: dict[str, Any] = {}
        if self.lookup is not None:
            drafting["prompt_lookup_num_tokens"] = self.lookup
        if self.assisted:
            drafting["assistant_model"] = self.loaded.model("assistant")
        passes = _Passes()
        hook = model.register_forward_pre_hook(passes.begin)
        try:
            with torch.inference_mode():
                begin = time.perf_counter()
                output = model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=request.max_new_tokens[0],
                    eos_token_id=list(request.stop_tokens) or None,
                    pad_token_id=(list(request.stop_tokens) or [0])[0],
                    streamer=_Streamer(passes),
                    **drawing,
                    **drafting,
                )
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
                end = time.perf_counter()
        finally:
            hook.remove()
        new = tuple(output[0, tokens.shape[1] :].tolist())
        first_end = passes.begins[1] if len(passes.begins) > 1 else end
        emitted = tuple(passes.put[2:])
        row = Decoded(
            new,
            self.tokenizer.decode(new, skip_special_tokens=True),
            emitted,
            tuple(max(count - 1, 0) for count in emitted),
            len(emitted),
        )
        return DecodedGroup((row,), first_end - begin, end - first_end, 0.0)

    def draws_like_plain(self, temperature: float) -> bool:
        """Only without draws: PyTorch has a random stream of its own."""
        return temperature == 0

    def breakdown(
        self, prompts: Sequence[list[int]], request: Request, rounds: int
    ) -> Breakdown | None:
        """Not told apart."""
        return None

    def trees(
        self, prompt: list[int], request: Request, emitted: Sequence[int]
    ) -> tuple[RoundTree, ...] | None:
        """Not seen."""
        return None

    def pieces(self, prompt: list[int], tokens: Sequence[int]) -> tuple[str, ...] | None:
        """Every token's own text."""
        return tuple(self.tokenizer.decode([token]) for token in tokens)


WAYS: dict[str, dict[str, Any]] = {
    "hf-plain": {},
    "hf-prompt-lookup": {"lookup": LOOKUP_TOKENS},
    "hf-assisted": {"assisted": True},
}
"""Fields of :class:`HuggingFaceDecoder` by method."""


def decoder(name: str, loaded: Loaded, tokenizer: Any, assistant: str | None) -> HuggingFaceDecoder:
    """The method of this name.

    Args:
      name: such as ``hf-plain``.
      loaded: the models.
      tokenizer: a transformers tokenizer.
      assistant: how the small language model was named.
    """
    way = WAYS[name]
    setting = Setting(assistant if way.get("assisted") else None, None, None, {})
    return HuggingFaceDecoder(name, setting, loaded, tokenizer, **way)
