"""The page at ``/``: one file, and the policy that lets a browser run its script and no other."""

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_OPEN = "default-src 'none'; img-src data:; connect-src 'self'; base-uri 'none'; "
_CLOSED = "form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True)
class Page:
    """What ``GET /`` answers."""

    body: bytes
    """HTML in UTF-8."""
    headers: dict[str, str]
    """Content type, policy and what else a browser must know."""


def read_page() -> Page:
    """Read the page, which lies beside this file."""
    text = (Path(__file__).parent / "page.html").read_text("utf-8")
    policy = "".join(f"{name}-src {_digest(text, name)}; " for name in ("style", "script"))
    return Page(
        body=text.encode(),
        headers={
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": _OPEN + policy + _CLOSED,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        },
    )


def _digest(text: str, element: str) -> str:
    """What a policy calls the only inline style or script of a page."""
    [inside] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"
