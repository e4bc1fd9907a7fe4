"""The figures of the LongSpec paper (arXiv:2502.17421) that ``infer.bench paper`` stands beside.

Tables 1 (section 4.2) and 4 (appendix G), of temperature 0, float16 and one A100 with 80 GB.
Speed-ups are not kept but computed, against the paper's Vanilla FA of the same task, and are
within 0.01 of those printed: the caption of Table 1 names Vanilla HF, but its figures are ratios to
Vanilla FA. Two things in them look wrong, and are left as printed: Vanilla HF's speed of LCC is
that of GovReport to the digit in four of five models, and the times of Table 4 add up to more than
its speeds leave room for.

The paper does not say how long its prompts are. LongBench counts words (``task.md`` of its
repository); at 4/3 tokens a word of prose and 3 a word of code, its means are some 11,600, 14,200,
2,800, 3,700 and 12,600 tokens. That is within two of the ranges of Table 4, whose middles stand for
the tasks here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """What the paper says of a method and a task."""

    acceptance_length: float
    tokens_per_second: float

    def over(self, plain: "Published") -> float:
        """The speed-up."""
        return self.tokens_per_second / plain.tokens_per_second


@dataclass(frozen=True)
class PublishedRange:
    """A column of the paper's Table 4: LongSpec with LongChat-7B on GovReport."""

    tokens_per_second: float
    acceptance_length: float
    draft_ms: float
    target_ms: float
    verify_ms: float


SHORT, LONG = "0-5k", "10-15k"
RANGES = {
    SHORT: 2500,
    "5-10k": 7500,
    LONG: 12500,
    "15-20k": 17500,
    "20-25k": 22500,
    "25-32k": 28500,
}
"""Prefill lengths of Table 4, and their middles."""
TASKS = {
    "GovReport": RANGES[LONG],
    "QMSum": RANGES[LONG],
    "Multi-News": RANGES[SHORT],
    "LCC": RANGES[SHORT],
    "RepoBench-P": RANGES[LONG],
}
"""The tasks of Table 1, in its order, and the cached tokens that stand for their prompts."""

PLAIN, EAGER, MAGICDEC, LONGSPEC = "Vanilla FA", "Vanilla HF", "MagicDec", "LongSpec"
_Pairs = tuple[float, ...]
_TABLE_1: dict[str, dict[str, _Pairs]] = {
    "V-7B": {
        EAGER: (1.00, 25.25, 1.00, 18.12, 1.00, 27.29, 1.00, 25.25, 1.00, 19.18),
        PLAIN: (1.00, 45.76, 1.00, 43.68, 1.00, 55.99, 1.00, 54.07, 1.00, 46.61),
        MAGICDEC: (2.23, 41.68, 2.29, 42.91, 2.31, 44.82, 2.52, 46.96, 2.57, 48.75),
        LONGSPEC: (3.57, 102.23, 3.14, 88.87, 3.51, 100.55, 3.73, 107.30, 3.86, 110.76),
    },
    "V-13B": {
        EAGER: (1.00, 17.25, 1.00, 11.86, 1.00, 18.81, 1.00, 17.25, 1.00, 13.44),
        PLAIN: (1.00, 28.52, 1.00, 27.43, 1.00, 35.01, 1.00, 33.87, 1.00, 29.14),
        MAGICDEC: (2.95, 38.24, 2.87, 37.15, 2.97, 39.47, 2.96, 38.40, 2.94, 36.66),
        LONGSPEC: (3.31, 71.08, 2.76, 57.15, 3.44, 78.20, 3.57, 81.00, 3.59, 77.22),
    },
    "LC-7B": {
        EAGER: (1.00, 25.27, 1.00, 14.11, 1.00, 27.66, 1.00, 25.27, 1.00, 17.02),
        PLAIN: (1.00, 42.14, 1.00, 36.87, 1.00, 50.19, 1.00, 54.17, 1.00, 42.69),
        MAGICDEC: (2.26, 41.90, 2.20, 40.82, 2.32, 43.94, 2.77, 51.73, 2.57, 44.13),
        LONGSPEC: (3.59, 101.43, 3.06, 85.23, 3.41, 97.93, 4.21, 122.30, 4.03, 115.27),
    },
    "LC-13B": {
        EAGER: (1.00, 17.72, 1.00, 12.08, 1.00, 18.74, 1.00, 17.72, 1.00, 13.85),
        PLAIN: (1.00, 28.56, 1.00, 27.18, 1.00, 35.37, 1.00, 34.58, 1.00, 29.74),
        MAGICDEC: (2.40, 31.37, 2.38, 30.84, 2.43, 32.58, 2.68, 35.77, 2.85, 35.67),
        LONGSPEC: (3.58, 76.26, 3.15, 64.41, 3.50, 80.48, 4.01, 90.92, 4.46, 96.96),
    },
    "L-8B": {
        EAGER: (1.00, 21.59, 1.00, 18.67, 1.00, 29.91, 1.00, 29.48, 1.00, 22.77),
        PLAIN: (1.00, 53.14, 1.00, 51.22, 1.00, 56.94, 1.00, 56.73, 1.00, 54.08),
        MAGICDEC: (2.04, 36.14, 2.00, 35.78, 2.33, 39.57, 2.65, 46.95, 2.61, 44.39),
        LONGSPEC: (3.25, 84.57, 2.99, 75.68, 3.36, 91.11, 3.28, 89.33, 3.39, 91.28),
    },
}
"""Table 1: acceptance length and tokens per second of every task in turn."""
TABLE_1: dict[str, dict[str, dict[str, Published]]] = {
    model: {
        method: {
            task: Published(*pair)
            for task, pair in zip(TASKS, zip(row[::2], row[1::2], strict=True), strict=True)
        }
        for method, row in rows.items()
    }
    for model, rows in _TABLE_1.items()
}
"""Table 1 by model, method and task. The paper's L-8B is Llama-3.1-8B-Instruct."""
MODELS = {
    "vicuna7b": "V-7B",
    "vicuna13b": "V-13B",
    "longchat7b": "LC-7B",
    "longchat13b": "LC-13B",
    "llama3-8b": "L-8B",
    "llama31-8b": "L-8B",
}
"""The paper's models by our shapes."""
STAND_IN = "V-7B"
"""Whose acceptance lengths a shape takes that the paper has no model of."""


def model_of(shape: str) -> str:
    """The paper's model whose acceptance lengths a shape takes."""
    return MODELS.get(shape, STAND_IN)


TABLE_4_MODEL = "LC-7B"
TABLE_4: dict[str, PublishedRange] = {
    "0-5k": PublishedRange(116.65, 4.01, 8.91, 25.63, 6.18),
    "5-10k": PublishedRange(115.52, 3.97, 8.92, 25.66, 6.22),
    "10-15k": PublishedRange(114.54, 3.97, 8.93, 25.61, 6.23),
    "15-20k": PublishedRange(113.47, 4.12, 8.98, 27.30, 6.24),
    "20-25k": PublishedRange(115.13, 4.45, 9.13, 29.08, 6.27),
    "25-32k": PublishedRange(103.68, 3.97, 9.25, 30.89, 6.28),
}
"""Table 4 by range of prefill lengths."""
