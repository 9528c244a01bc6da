"""``python -m reproduce EXPERIMENT``: the paper's tables and figures, each by one command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dpbam.app.cli.boundary import guarded


def main(args: Sequence[str] | None = None) -> int:
    """Run the command with ``args`` (default: the process's own) and return the exit code."""

    def run() -> int:
        from dpbam.app.cli.app import single
        from reproduce import command

        result = single("reproduce", command.run, command.EXAMPLES).main(
            args=None if args is None else list(args),
            prog_name="python -m reproduce",
            standalone_mode=False,
        )
        return result if isinstance(result, int) else 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
