"""guidellm: a short load whose counts of tokens are those that the server reports."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.serve.clients.checks import TOKENIZER, Checks, run

REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 12, 48, 24


def checks(own: Checks) -> None:
    """All of them."""
    with own.check("a run of four streams"), tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        target = f"kind=openai_http,target={own.base_url},model={own.model['id']}"
        tokens = f"prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}"
        command = [str(Path(sys.executable).with_name("guidellm")), "run"]
        command += ["--backend", f"{target},request_format=/v1/completions,api_key={own.key}"]
        command += ["--profile", "kind=concurrent,streams=4"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--data", f"kind=synthetic_text,{tokens}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
        command += ["--output", f"kind=json,path={out}", "--disable-progress"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-800:] or done.stdout[-800:]
        [benchmark] = json.loads(out.read_text())["benchmarks"]
        requests: dict[str, list[Any]] = benchmark["requests"]
        assert not requests["errored"] and len(requests["successful"]) == REQUESTS
        for each in requests["successful"]:
            assert each["output_metrics"]["text_tokens"] == NEW_TOKENS, each["output_metrics"]


if __name__ == "__main__":
    run("guidellm", checks)
