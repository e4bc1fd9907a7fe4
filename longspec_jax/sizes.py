"""Sizes of memory as people read them, the same wherever one is shown."""


def shown_bytes(count: float) -> str:
    """Bytes with a decimal unit: ``75.5 MB``, ``16.06 GB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
