"""Replicas under Ray Serve: where Ray is installed, over engines without a model."""

import http.client
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs the extra ray: pip install 'longspec_jax[ray]'")

import ray
from ray import serve

from contrib.ray_app import Replica, application
from infer.serve.app import Served
from infer.serve.engine_thread import EngineThread
from infer.serve.metrics import Metrics
from longspec_jax import LongSpec
from tests.serve.kit import LEVELS, ScriptedEngine, events, scripted_model

PORT = 8199


class Scripted(Replica):
    """A replica that is named by its process."""

    def load(self, argv: list[str]) -> Served:
        metrics = Metrics(LEVELS)
        limits = {"queue_requests": 16, "queue_tokens": 1000, "levels": LEVELS}
        thread = EngineThread(ScriptedEngine(), metrics, **limits)
        model = scripted_model(names=(f"{os.getpid()}",))
        return Served(model, thread, metrics, api_keys=("open",))


@pytest.fixture(scope="module")
def replicas() -> Any:
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False)
    serve.start(http_options={"port": PORT})
    serve.run(application({"replicas": 2, "gpus": 0, "api_key": "open"}, Scripted))
    yield None
    serve.shutdown()
    ray.shutdown()


def asked(session: str | None, stream: bool = False, key: str = "open") -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    headers |= {} if session is None else {"x-session-id": session}
    body = {"prompt": "ab", "max_tokens": 7, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def test_a_conversation_stays_with_its_replica(replicas: Any) -> None:
    of_session = {
        session: {json.loads(asked(session).read())["model"] for _ in range(6)}
        for session in map(str, range(8))
    }
    assert all(len(models) == 1 for models in of_session.values()), of_session
    assert len(set.union(*of_session.values())) == 2, "both replicas are used"


def test_streams_pass_and_the_key_is_wanted(replicas: Any) -> None:
    *chunks, done = events(asked("a", stream=True))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "cdefghi"
    assert asked("a", key="wrong").status == 401


def test_options_are_those_of_the_server() -> None:
    with pytest.raises(
        ValueError, match="unknown option --max_length; did you mean --max_model_len"
    ):
        application({"replicas": 2, "max_length": 5})


@pytest.mark.slow
def test_replicas_of_the_demo_say_what_plain_decoding_says(replicas: Any) -> None:
    """The last test here: it puts the demo in the place of the scripted replicas."""
    serve.run(application({"replicas": 2, "gpus": 0, "max_num_seqs": 2, "max_model_len": 128}))
    prompts = ["def first(", "class Second:", "import ", "for each in "]
    with ThreadPoolExecutor(len(prompts)) as pool:
        served = list(pool.map(_completed, prompts))
    model = LongSpec.demo()
    plain = [model.generate(prompt, max_new_tokens=16, tree="none").text[0] for prompt in prompts]
    assert served == plain


def _completed(prompt: str) -> str:
    """What the fleet says to a prompt of a conversation of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=300)
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
    headers = {"Content-Type": "application/json", "x-session-id": prompt}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return json.loads(connection.getresponse().read())["choices"][0]["text"]
