"""The target passes of a text, told apart by the tokens that no draft proposed."""

from collections.abc import Sequence


def by_round(drafted: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of every target pass, and the draft tokens among them.

    A pass ends with the token that no draft proposed; the last one may have been cut before it,
    and all of its tokens are the draft's then.

    Args:
      drafted: of every emitted token, the prefill's first.
    """
    emitted, accepted = [], []
    count = 0
    for draft in drafted[1:]:
        count += 1
        if not draft:
            emitted.append(count)
            accepted.append(count - 1)
            count = 0
    if count:
        emitted.append(count)
        accepted.append(count)
    return tuple(emitted), tuple(accepted)
