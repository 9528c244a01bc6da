"""``python -m reproduce EXPERIMENT``: the paper's tables and figures, each by one command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from dpbam.app.runs.pool import StoppedError
from dpbam.errors import DPBAMError

_EXAMPLES = (
    "fig2",
    "all --jobs 2",
    "table1 --scale desk --only 'dp-sgd-epsilon-10-*'",
    "all --shard 3/8",
    "table1 --scale full --dry-run",
    "table1 --scale full --steps 1 --batch-size 8",
    "all --only-report --docs docs",
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command with ``args`` (default: the process's own) and return the exit code.

    It is 2 after an error that the user can fix, which is shown as one sentence.
    """
    from reproduce.command import run

    prog = "python -m reproduce"
    program = typer.Typer(add_completion=False)
    program.command(epilog="\n\n".join(f"$ {prog} {example}" for example in _EXAMPLES))(run)
    command, given = typer.main.get_command(program), None if args is None else list(args)
    try:
        return command.main(given, prog, standalone_mode=False) or 0
    except typer.Abort:  # Ctrl-C before the first run
        return 130
    except StoppedError:
        print("stopped, and saved: the same command resumes, and keeps finished runs",
              file=sys.stderr)  # fmt: skip
        return 130
    except Exception as error:
        format_message = getattr(error, "format_message", error.__str__)  # of typer's own
        if not isinstance(error, DPBAMError | OSError) and format_message == error.__str__:
            raise
        print(f"error: {' '.join(str(format_message()).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
