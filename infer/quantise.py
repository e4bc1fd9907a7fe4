"""Write a target's weights in 8 or 4 bits.

    python -m infer.quantise TARGET --format=w4a16 --out=FOLDER
    python -m infer.decode --target=FOLDER --draft=DRAFT

fp8 halves the bytes of a 16-bit target's linears, w4a16 leaves a quarter and the scales of groups
of 128 inputs. Weights are rounded to nearest; nothing is calibrated. LM head, embeddings and norms
stay as they are. The folder is a checkpoint in the format of compressed-tensors, which other
engines read. A draft of the target serves the quantised one.
The exit status is 0, or 2 for bad input.
"""

import sys
from collections.abc import Sequence

from longspec_jax import cli
from longspec_jax.checks import shown_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    return cli.run(lambda: _command(argv), argv)


def _command(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    from longspec_jax.weights.quantised.write import quantise  # Late: --help answers at once.

    written = quantise(
        arguments.target, arguments.format, arguments.out, revision=arguments.revision
    )
    groups = f", groups of {written.group} inputs" if written.group else ""
    print(
        f"{arguments.out}: {written.linears} linears in {arguments.format}{groups}; "
        f"{shown_bytes(written.bytes)} of {shown_bytes(written.source_bytes)}"
    )
    return cli.OK


def _parser() -> cli.Parser:
    parser = cli.Parser(prog=cli.command_name(__package__, "quantise"), description=__doc__)
    parser.add_argument("target", help="a folder or hub id in 16 or 32 bits")
    parser.add_argument("--format", required=True, choices=("fp8", "w4a16"), help="of the linears")
    parser.add_argument("--out", required=True, help="the folder to write; must not exist")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    return parser


if __name__ == "__main__":
    sys.exit(main())
