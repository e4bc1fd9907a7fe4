"""Tokens and acceptance of calls through the public interface, by name.

Every model and tree is one :class:`longspec_jax.LongSpec` of three rows: options, seeds, prompts,
budgets and stops are rows of the same few programs.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from longspec_jax import LongSpec, demo_prompts
from tests.golden.models import MODELS, TRAINED, Models

LENGTHS = 139, 41, 2
SAMPLED: dict[str, Any] = {"temperature": [0.7, 1.0, 1.3], "seed": [5, 6, 7]}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "filtered": {**SAMPLED, "top_k": [0, 9, 40], "top_p": [0.8, 1.0, 0.95], "min_p": [0, 0, 0.05]},
    "sampled": SAMPLED,
    "one greedy": {**SAMPLED, "temperature": [0.0, 0.7, 1.0]},
    "stops": {**SAMPLED, "seed": 3, "eos_token_id": [[*range(20)], [], [*range(50, 58)]]},
    "budgets": {"temperature": 1.0, "seed": [8, 9, 10], "max_new_tokens": [1, 7, 19]},
    "biased": {**SAMPLED, "repetition_penalty": 1.4, "logit_bias": {5: 40.0}},
}
"""Of three rows each; those of a model that is not ``whole`` are the first two."""
STOP_STRINGS = {**SAMPLED, "stop_strings": [" the", ".", "\n"]}
NEW = 24


def recorded(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """Every wanted call, with what came out; an error stands for itself."""
    for name, models in {**MODELS, **TRAINED}.items():
        for tree in models.trees:
            spec = None
            for call in _calls(models):
                if wanted(full := f"{name}/{tree}/{call}"):
                    try:
                        spec = spec or loaded(folder, models, tree)
                        yield full, _run(spec, _prompts(spec, models), call)
                    except Exception as error:
                        yield full, f"{type(error).__name__}: {error}"


def _calls(models: Models) -> list[str]:
    if not models.whole:
        return [*CALLS][:2]
    own = ["stop strings"] if models.target == "demo" else ["stream", "engine"]
    return [*CALLS, *own, *(["compare"] if models.draft else [])]


CONTRIBUTED = {"medusa": "contrib.medusa:", "tokenswift": "contrib.tokenswift:"}
"""What names the module of a draft outside the library."""


def loaded(folder: Path, models: Models, tree: str, dtype: str = "float32") -> LongSpec:
    """The models of an entry, whose calls run this tree."""
    if models.target == "demo":
        return LongSpec.demo(draft=models.draft, dtype=dtype, tree=tree, prefill_chunk=256)
    drafts = [models.draft] if isinstance(models.draft, str) else models.draft or []
    found = [
        f"{CONTRIBUTED.get(each, '')}{folder / each}" if (folder / each).is_dir() else each
        for each in drafts
    ]
    draft = found[0] if len(found) == 1 else found or None
    return LongSpec.from_pretrained(
        folder / models.target,
        draft,
        dtype=dtype,
        tree=tree,
        prefill_chunk=64,
        draft_options=models.options or None,
    )


def _prompts(spec: LongSpec, models: Models) -> list[list[int]]:
    """Three prompts with repetitions, so that what looks tokens up finds some."""
    if models.target == "demo":
        texts = [*demo_prompts().values()][:3]
        return [
            spec.tokenizer(text)["input_ids"][: 4 * n]
            for text, n in zip(texts, LENGTHS, strict=True)
        ]
    width = min(spec.target_config.vocab_size, 97)
    return [[(7 * i + 3 * (i % 13) ** 2) % (width - 3) for i in range(n)] for n in LENGTHS]


def _run(spec: LongSpec, prompts: list[list[int]], call: str) -> Any:
    base: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": []}
    match call:
        case "stream":
            rounds = [*spec.stream(prompts, **{**base, **SAMPLED})]
            return [[list(each.tokens[row]) for each in rounds] for row in range(len(prompts))]
        case "engine":
            return _through_slots(spec, prompts, base)
        case "compare":
            both = spec.compare(prompts, **{**base, **SAMPLED})
            return [both.identical, _of(both.speculative), _of(both.plain)]
        case "stop strings":
            return _of(spec.generate(prompts, **{**base, **STOP_STRINGS}))
        case _:
            return _of(spec.generate(prompts, **{**base, **CALLS[call]}))


def _of(result: Any) -> dict[str, Any]:
    return {
        "tokens": [list(row) for row in result.sequences],
        "drafted": ["".join("01"[one] for one in row) for row in result.drafted],
        "histograms": [list(row) for row in result.stats.histograms],
        "text": list(result.text),
    }


def sizes(spec: LongSpec, slots: int, tokens: int) -> Any:
    """Options of an engine by the names that this version has for them."""
    known = inspect.signature(spec.engine).parameters
    return {
        "slots" if "slots" in known else "max_num_seqs": slots,
        "max_tokens" if "max_tokens" in known else "max_model_len": tokens,
    }


def _through_slots(spec: LongSpec, prompts: list[list[int]], base: dict[str, Any]) -> Any:
    """Five requests through two slots; tokens, rounds and the end of each."""
    found: dict[int, Any] = {}
    with spec.engine(**sizes(spec, 2, 192)) as engine:
        for index, prompt in enumerate([*prompts, *prompts[:2]]):
            own = {"temperature": (0.0, 0.9)[index % 2], "seed": index}
            found[engine.submit(prompt, **{**base, **own})] = [[], [], None]
        while engine.busy:
            for output in engine.step():
                one = found[output.id]
                one[0] += output.tokens
                one[1] += output.rounds
                one[2] = output.finish
    return list(found.values())
