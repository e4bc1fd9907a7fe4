"""Partial verification as it was published: fast, and *not lossless*.

SpecPV (arXiv:2512.02337) emits what was verified over part of the cache. The full pass computes the
exact keys and values of those tokens and goes on from them, so that errors do not add up in the
cache; but a token that only the whole context would have ruled out stays in the text. Everything
else in the library keeps the text exact: this is for those who want to know what that costs.
"""

from longspec_jax.drafters.hierarchy import Hierarchy


class LossyHierarchy(Hierarchy):
    """A hierarchy whose whole chain is emitted; satisfies :class:`.base.Lossy`."""

    @property
    def name(self) -> str:
        """Says wherever it is told that it is not lossless."""
        return f"{super().name}, not lossless"

    @property
    def trusted(self) -> int:
        """The chain; a tree at its end is verified in full."""
        return self.levels

    @property
    def changes_the_output(self) -> str:
        """What is not verified."""
        return "tokens are emitted that were verified over a part of the context alone"
