"""Real clients against a running server, each a script of its own.

The suite itself has the openai client. These are no tests of it, because their packages do not go
together with its environment. The server runs in the project's environment, and the clients in one
of their own::

    python -m infer.serve --chat_template=vicuna --max_len=1024 --tree=2,2
    pip install litellm langchain-openai "lm-eval[api]" guidellm aiperf schemathesis torch
    python -m tests.serve.clients --base_url=http://127.0.0.1:8000 --out=summary.json
"""
