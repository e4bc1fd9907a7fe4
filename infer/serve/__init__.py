"""An HTTP server that speaks OpenAI's protocol over one engine.

- ``arguments``, ``command``: options; load, plan, compile, serve.
- ``http_server``, ``guards``: the port and its connections; keys, hosts and the size of bodies.
- ``app``: routes. ``protocol``: the fields of requests, their refusals and the OpenAPI document.
- ``calls``: the rows that a request asks the engine for. ``engine_thread``: the one thread of it.
- ``streaming``: what rows gain, on its way to a reader. ``answers``: bodies and chunks.
  ``metrics``: counts for Prometheus.
"""
