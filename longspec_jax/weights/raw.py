"""Reading values of a parsed ``config.json``, where null and absent mean the same."""

from typing import Any, TypeAlias

RawConfig: TypeAlias = dict[str, Any]
"""A parsed ``config.json``."""


def value(raw: RawConfig, key: str, default: Any) -> Any:
    """The value of a key, or the default if it is null or absent."""
    found = raw.get(key)
    return default if found is None else found


def check_keys(raw: RawConfig, keys: tuple[str, ...], who: str) -> None:
    """Refuse a file that leaves out what has no safe default."""
    missing = [key for key in keys if raw.get(key) is None]
    if missing:
        raise ValueError(
            f"the config.json of {who} lacks {', '.join(missing)}; use the file that was saved with "
            "the weights"
        )
