"""Run all clients one after the other and write their summaries with a header."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SERVER = "--chat_template=vicuna --max_len=1024 --tree=2,2"
NAMES = ("litellm", "langchain", "lm_eval", "guidellm", "aiperf", "schemathesis")


def main() -> int:
    """Returns the number of clients of which a check failed, and of faults of the engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base_url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--api_key", default="none")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--out", type=Path, default=Path("serve_clients.json"))
    arguments = parser.parse_args()
    commit = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    header: dict[str, Any] = {
        "method": f"tests.serve.clients against infer.serve {SERVER}",
        "device": f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "commit": subprocess.run(commit, capture_output=True, text=True, cwd=HERE).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }
    rows = []
    for name in arguments.only:
        given = [f"--base_url={arguments.base_url}", f"--api_key={arguments.api_key}"]
        command = [sys.executable, "-m", f"tests.serve.clients.with_{name}", *given]
        print(f"{name} ...", flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        try:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        except (IndexError, json.JSONDecodeError):
            print(done.stdout)
            rows.append({"client": name, "checks": [{"check": "runs", "ok": False}]})
        for each in rows[-1]["checks"]:
            print(f"  {'ok    ' if each['ok'] else 'FAILED'} {each['check']}", flush=True)
    bearer = {"Authorization": f"Bearer {arguments.api_key}"}
    request = urllib.request.Request(f"{arguments.base_url}/metrics", headers=bearer)
    with urllib.request.urlopen(request) as answer:
        counts = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines())
    header["recoveries"] = int(float(counts["longspec:num_recoveries_total"]))
    text = json.dumps({"header": header, "rows": rows}, indent=1, ensure_ascii=False)
    arguments.out.write_text(text + "\n")
    failed = sum(not all(each["ok"] for each in row["checks"]) for row in rows)
    return failed + header["recoveries"]


if __name__ == "__main__":
    sys.exit(main())
