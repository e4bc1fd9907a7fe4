"""Measure drafting methods side by side on long-context tasks, and keep every raw count.

    python -m infer.eval --task=demo --out=runs/eval_demo
    python -m infer.eval --task=gov_report --target=FOLDER --draft=FOLDER --out=runs/gov_report

``--help`` lists the rest.
"""

import sys
from collections.abc import Callable, Sequence

from longspec_jax import cli

# Everything else is imported where it is needed: --help and a typing error need no slow imports,
# and Ctrl-C is answered from the start.


def main(argv: Sequence[str] | None = None, end: Callable[[int], object] | None = None) -> int:
    """Run the command; the exit status. ``end`` ends the process after a signal, in tests."""
    typed = sys.argv[1:] if argv is None else list(argv)
    return cli.run(lambda: _run(typed, end), typed)


def _run(typed: Sequence[str], end: Callable[[int], object] | None) -> int:
    """Read and check the arguments, before anything slow, and do what they say."""
    from .arguments import config_of

    config = config_of(typed)
    from .run import Evaluation

    evaluation = Evaluation(config)
    try:
        cli.run_in_thread(evaluation.work)
        return cli.OK
    except KeyboardInterrupt as stop:
        return cli.leave(stop, evaluation.save, end)
    finally:
        evaluation.progress.close()


if __name__ == "__main__":
    sys.exit(main())
