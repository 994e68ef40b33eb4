"""The ``leyden`` command: one table of subcommands, each imported when it is called."""

import argparse
import sys
from collections.abc import Sequence

from leyden.__about__ import __version__
from leyden.base.registry import did_you_mean, import_from

__all__ = ["main"]

# name -> (the function that runs it with the rest of the arguments and returns an exit code, one line of help)
COMMANDS = {
    "demo": ("leyden.cli.demo:main", "train a small network on handwritten digits, test it, reload it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``leyden COMMAND ...``.

    Args:
        argv: The arguments after the program's name; default: those of this process.

    Returns:
        The exit code of the subcommand: 0 when it did what was asked.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    if arguments.command not in COMMANDS:
        parser.error(f"no command {arguments.command!r}: {did_you_mean(arguments.command, COMMANDS)}")
    target, _ = COMMANDS[arguments.command]
    return import_from(target)(arguments.arguments) or 0


def _parser() -> argparse.ArgumentParser:
    table = "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="leyden",
        description="Trains PyTorch models, from one CPU to a cluster.",
        epilog=f"commands:\n{table}\n\n`leyden COMMAND --help` shows a command's own options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"leyden {__version__}")
    parser.add_argument("command", nargs="?", help="one of those below")
    # Everything behind the command is the command's own, options included.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
