"""aiperf: a short load without errors, with the server's token counts and acceptance."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.serve.clients.checks import TOKENIZER, Checks, run

REQUESTS, NEW_TOKENS = 12, 24


def checks(own: Checks) -> None:
    """Completions, and chat if the model has a template."""
    for kind in ("completions", "chat") if own.model["longspec"]["chat"] else ("completions",):
        with own.check(f"a run of four streams, {kind}"), tempfile.TemporaryDirectory() as folder:
            command = [str(Path(sys.executable).with_name("aiperf")), "profile"]
            command += [f"--model={own.model['id']}", f"--url={own.base_url}", "--streaming"]
            command += [f"--endpoint-type={kind}", f"--tokenizer={TOKENIZER}"]
            command += [f"--api-key={own.key}", f"--request-count={REQUESTS}", "--concurrency=4"]
            command += ["--isl=48", f"--osl={NEW_TOKENS}", "--extra-inputs=ignore_eos:true"]
            command += ["--use-server-token-count", f"--artifact-dir={folder}", "--ui=none"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=400)
            assert done.returncode == 0, (done.stdout + done.stderr)[-800:]
            [found] = Path(folder).rglob("profile_export_aiperf.json")
            told = json.loads(found.read_text())
            assert told["request_count"]["avg"] == REQUESTS, told["request_count"]
            assert not told.get("error_summary"), told["error_summary"]
            lengths = told["output_sequence_length"]
            assert lengths["min"] == lengths["max"] == NEW_TOKENS, lengths
            acceptance = {name for name in told if "accept" in name or "spec" in name}
            assert acceptance, sorted(told)


if __name__ == "__main__":
    run("aiperf", checks)
