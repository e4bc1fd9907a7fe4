"""The files of ``deploy/`` start the server with options that it has, and wait long enough."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from infer.arguments import check, models_of
from infer.serve import arguments
from infer.serve.guards import MOST_BYTES

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "longspec-serve.service").read_text()
CONTAINER = (DEPLOY / "Containerfile").read_text()
DEPLOYMENT, SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
[SERVER] = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
ENTRY = json.loads(re.findall(r"^ENTRYPOINT (.*)$", CONTAINER, re.MULTILINE)[0])


def unit_command() -> list[str]:
    [line] = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    return shlex.split(line)


def parsed(command: list[str]) -> Any:
    assert Path(command[0]).name == "longspec-serve"
    given = arguments.parser().parse_args(command[1:])
    check(models_of(given))
    return given


def test_the_unit_waits_for_what_runs() -> None:
    given = parsed(unit_command())
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert given.drain_seconds < int(stop)
    assert given.host == "127.0.0.1" and given.api_key is None
    assert str(given.api_key_file) == "%d/key" and "LoadCredential=key:" in UNIT


def test_the_container_serves_at_its_port() -> None:
    given = parsed([*ENTRY, "--target=/models/target"])
    assert given.host == "0.0.0.0" and f"EXPOSE {given.port}\n" in CONTAINER
    assert re.search(r"^USER 1000$", CONTAINER, re.MULTILINE)
    # A volume itself may be another user's, or open to all, and is then refused.
    assert re.search(r"^ENV LONGSPEC_CACHE=/cache/\w+ ", CONTAINER, re.MULTILINE)


def test_the_manifest_is_the_container_s() -> None:
    given = parsed([*ENTRY, *SERVER["args"]])
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    assert given.drain_seconds < pod["terminationGracePeriodSeconds"]
    assert SERVER["ports"] == [{"name": "http", "containerPort": given.port}]
    for probe in ("startupProbe", "readinessProbe"):
        assert SERVER[probe]["httpGet"] == {"path": "/health", "port": "http"}
    mounted = {mount["name"] for mount in SERVER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == labels == DEPLOYMENT["spec"]["selector"]["matchLabels"]


def test_the_manifest_mounts_the_secret_that_its_first_lines_make() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    [(name, key)] = re.findall(r"kubectl create secret generic (\w+) --from-literal=(\w+)=", text)
    volumes = DEPLOYMENT["spec"]["template"]["spec"]["volumes"]
    [secret] = [volume for volume in volumes if "secret" in volume]
    [mount] = [one for one in SERVER["volumeMounts"] if one["name"] == secret["name"]]
    assert secret["secret"] == {"secretName": name}
    assert f"--api_key_file={mount['mountPath']}/{key}" in SERVER["args"]
    [port] = SERVICE["spec"]["ports"]
    assert port["targetPort"] in [one["name"] for one in SERVER["ports"]]


def test_the_proxy_does_not_buffer_and_takes_what_the_server_takes() -> None:
    site = (DEPLOY / "nginx.conf").read_text()
    assert "proxy_buffering off;" in site
    assert f"client_max_body_size {MOST_BYTES // 2**20}m;" in site


@pytest.mark.parametrize("file", sorted(DEPLOY.iterdir()), ids=lambda file: file.name)
def test_every_file_is_listed(file: Path) -> None:
    assert f"]({file.name})" in (DEPLOY / "README.md").read_text() or file.name == "README.md"
