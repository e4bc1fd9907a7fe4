"""Serve a model over HTTP, in OpenAI's protocol, with speculation and the target's own text.

    python -m infer.serve
    python -m infer.serve --target=FOLDER --draft=FOLDER --port=8000 --max_model_len=32768

Without options it serves the embedded demo only on this machine. ``--help`` lists the rest.
"""

import sys
from collections.abc import Callable, Sequence

from longspec_jax import cli

# Everything else is imported where it is needed: --help and a typing error need no slow imports,
# and Ctrl-C is answered from the start.


def main(argv: Sequence[str] | None = None, end: Callable[[int], object] | None = None) -> int:
    """Run the command.

    Args:
      argv: the arguments; those of the process if absent.
      end: ends the process after a signal that comes before it serves, in tests.

    Returns:
      The exit status: 0 after a signal while it serves, 2 for bad input, 1 for a failure while
      running, 130 after Ctrl-C and 143 after SIGTERM before it serves.
    """
    return cli.run(lambda: _run(argv, end), argv)


def _run(argv: Sequence[str] | None, end: Callable[[int], object] | None) -> int:
    """Check everything that can be checked before anything slow, load, and serve."""
    from ..arguments import check, models_of
    from . import arguments as arguments_lib

    arguments = arguments_lib.parser().parse_args(argv)
    check(models_of(arguments))
    keys = arguments_lib.read_keys(arguments)
    from longspec_jax.extras import missing_packages

    if missing := missing_packages("serve"):
        raise ValueError(missing)
    from .command import Service
    from .http_server import bound

    with bound(arguments.host, arguments.port) as listener:
        service = Service(arguments, listener, keys)
        try:
            cli.run_in_thread(service.load)
        except KeyboardInterrupt as stop:
            return cli.leave(stop, lambda: cli.say("interrupted"), end)
        finally:
            service.status.close()
        return service.serve()


if __name__ == "__main__":
    sys.exit(main())
