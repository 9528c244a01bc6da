"""``python -m reproduce EXPERIMENT``: the paper's tables and figures, each by one command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dpbam.app.cli import run_function


def main(args: Sequence[str] | None = None) -> int:
    """Run the command with ``args`` (default: the process's own) and return the exit code."""
    from reproduce import command

    return run_function(command.run, "python -m reproduce", args)


if __name__ == "__main__":
    sys.exit(main())
