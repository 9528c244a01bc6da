"""The command line: ``dpbam COMMAND``. Commands are thin, and import torch when they need it."""

from __future__ import annotations

from collections.abc import Sequence

from dpbam.app.cli.boundary import guarded

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run ``dpbam`` with ``args`` (default: the process's own) and return the exit code.

    Example:
        >>> main(["epsilon", "--noise-multiplier", "1.731", "--sampling-rate", "0.08192",
        ...       "--steps", "1000", "--delta", "1e-5", "--json"])
        {"epsilon": 7.99..., ...}
        0
    """

    def run() -> int:
        from dpbam.app.cli.app import command

        given = None if args is None else list(args)
        result = command().main(args=given, prog_name="dpbam", standalone_mode=False)
        return result if isinstance(result, int) else 0

    return guarded(run)
