"""schemathesis: requests made of the OpenAPI document; none may end in a defect of the server."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.serve.clients.checks import Checks, run

CHECKED = ("not_a_server_error", "status_code_conformance", "content_type_conformance")


def checks(own: Checks) -> None:
    """One run over all routes."""
    sentence = "no request ends in a defect, and every answer is described"
    with own.check(sentence), tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run"]
        command += [f"{own.base_url}/openapi.json", f"--checks={','.join(CHECKED)}"]
        command += ["--phases=fuzzing", "--max-examples=20", "--max-time=150", "--seed=1"]
        command += [f"--header=Authorization: Bearer {own.key}", "--request-timeout=60"]
        command += ["--no-color", "--workers=4", "--suppress-health-check=all"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder)
        assert done.returncode == 0, done.stdout[-3000:]


if __name__ == "__main__":
    run("schemathesis", checks)
