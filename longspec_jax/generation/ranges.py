"""What the options of a call may be, for the library, the command and its batch files alike.

Quick to import: a typing error is refused before the library's slow imports.
"""

from longspec_jax.checks import LARGEST_FLOAT32, Real, Whole

SAMPLING: dict[str, Whole | Real] = {
    "max_new_tokens": Whole(1),
    "temperature": Real(0.0, LARGEST_FLOAT32, ">= 0 (0 is greedy) and finite"),
    "top_k": Whole(0, note=" (0 keeps all tokens)"),
    "top_p": Real(0.0, 1.0, "in (0, 1] (1 keeps all tokens)", includes_least=False),
    "seed": Whole(0, 2**32 - 1),
}
TOKEN = Whole(0)
"""A token id; whether the target knows it is the target's to say."""
