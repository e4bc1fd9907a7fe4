"""Replicas of the server under Ray Serve; requests of one conversation meet the same replica.

    serve run contrib.ray_app:application replicas=2 target=FOLDER draft=FOLDER

Options are those of ``infer.serve``, without dashes, beside ``replicas`` and ``gpus``, a replica's.
A client names its conversation in the header ``x-session-id``. Ray's consistent hashing then sends
it where its prompt is cached, for as long as that replica lives and takes requests.
"""

from collections.abc import Mapping
from typing import Any

# Only the extra ray installs it.
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
from ray.serve.experimental.consistent_hash_router import (  # pyright: ignore[reportMissingImports]
    ConsistentHashRouter,
)

from infer.arguments import check, models_of
from infer.serve import arguments as arguments_lib
from infer.serve.app import Served, make_app
from infer.serve.engine_thread import State

MOST_REQUESTS = 1024
"""Of a replica, streams included. The server's own queue is shorter and answers 429."""


class Replica:
    """One server, whose port is Ray's."""

    def __init__(self, argv: list[str]) -> None:
        """Load the models and compile everything.

        Args:
          argv: options of ``infer.serve``.
        """
        self._served = self.load(argv)
        self._served.thread.start()

    def load(self, argv: list[str]) -> Served:
        """What the routes answer with."""
        from infer.serve.command import Service

        arguments = arguments_lib.parser().parse_args(argv)
        check(models_of(arguments))
        service = Service(arguments, None, arguments_lib.read_keys(arguments))
        service.load()
        return service.served()

    def __serve_build_asgi_app__(self) -> Any:
        """The routes, as Ray asks for them."""
        return make_app(self._served)

    def check_health(self) -> None:
        """Have Ray replace a replica whose engine has failed.

        Raises:
          RuntimeError: if it has.
        """
        if self._served.thread.state is State.FAILED:
            raise RuntimeError("the engine has failed")

    def __del__(self) -> None:
        """End the engine's thread, as Ray ends the replica once its requests have ended."""
        if (served := getattr(self, "_served", None)) is not None:
            served.thread.abandon()
            served.thread.close()


def application(options: Mapping[str, Any], replica: type[Replica] = Replica) -> Any:
    """The application, for ``serve run`` and ``serve.run``.

    Args:
      options: of the command.
      replica: what every replica runs.

    Raises:
      ValueError: for options that ``infer.serve`` does not have.
    """
    own = dict(options)
    replicas, gpus = int(own.pop("replicas", 1)), float(own.pop("gpus", 1))
    argv = [f"--{name}={value}" for name, value in own.items()]
    check(models_of(arguments_lib.parser().parse_args(argv)))
    deployment = serve.deployment(
        serve.ingress()(replica),
        name="longspec",
        num_replicas=replicas,
        max_ongoing_requests=MOST_REQUESTS,
        ray_actor_options={"num_gpus": gpus},
        request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
    )
    return deployment.bind(argv)
