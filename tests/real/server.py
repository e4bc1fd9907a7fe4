"""The command's server over a released model."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.real.kit import model_file


@contextmanager
def serving(name: str, *options: str) -> Iterator[Any]:
    """OpenAI's client of the command's server over a model, with options as they are typed."""
    from openai import OpenAI

    from infer.serve.arguments import parser
    from infer.serve.command import Service
    from infer.serve.http_server import HttpServer

    typed = [f"--target={model_file(name)}", f"--served_model_name={name}", *options]
    listener, ready = socket.create_server(("127.0.0.1", 0)), threading.Event()
    service = Service(parser().parse_args(typed), listener)
    service.load()
    server = HttpServer(service.served(), listener, 5.0)
    running = threading.Thread(target=lambda: asyncio.run(server.run(ready.set)))
    running.start()
    try:
        assert ready.wait(60)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with OpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
            yield client
    finally:
        server.stop()
        running.join(60)
