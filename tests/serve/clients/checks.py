"""What every client's script has: its options, and a list of checks with what they found."""

import argparse
import json
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPT = "def fibonacci(n):"
TOKENIZER = Path(__file__).parents[3] / "longspec_jax" / "demo" / "target"
"""The demo's tokenizer and weights, in the format of Hugging Face."""


class Checks:
    """A client, the server's address and what was found."""

    def __init__(self, package: str, arguments: argparse.Namespace) -> None:
        self.package, self.base_url = package, arguments.base_url.rstrip("/")
        self.key, self.found = arguments.api_key, list[dict[str, Any]]()

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """A check fails by an exception."""
        begun, error = time.monotonic(), None
        try:
            yield
        except Exception as caught:
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"[:400]
        seconds = round(time.monotonic() - begun, 2)
        self.found.append({"check": name, "ok": error is None, "seconds": seconds})
        if error is not None:
            self.found[-1]["error"] = error

    def get(self, path: str) -> Any:
        """The server's JSON answer, without a client."""
        request = urllib.request.Request(self.base_url + path)
        request.add_header("Authorization", f"Bearer {self.key}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    @property
    def model(self) -> dict[str, Any]:
        """The served model's entry."""
        return self.get("/v1/models")["data"][0]


def run(package: str, checks: Callable[[Checks], None]) -> None:
    """Run a script's checks and print their summary as the last line; exits with their number."""
    parser = argparse.ArgumentParser(description=f"{package} against a running server.")
    parser.add_argument("--base_url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--api_key", default="none")
    own = Checks(package, parser.parse_args())
    checks(own)
    failed = [each for each in own.found if not each["ok"]]
    summary = {"client": package, "version": version(package), "checks": own.found}
    print(json.dumps(summary, ensure_ascii=False))
    raise SystemExit(bool(failed))
