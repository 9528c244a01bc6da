"""The command line: ``dpbam COMMAND``. Commands are thin, and import torch when they need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpbam.app.cli.boundary import guarded

__all__ = ["main", "run_function"]


def main(args: Sequence[str] | None = None) -> int:
    """Run ``dpbam`` with ``args`` (default: the process's own) and return the exit code.

    Example:
        >>> main(["epsilon", "--noise-multiplier", "1.731", "--sampling-rate", "0.08192",
        ...       "--steps", "1000", "--delta", "1e-5", "--json"])
        {"epsilon": 7.99..., ...}
        0
    """

    def build() -> Any:
        from dpbam.app.cli.app import command

        return command()

    return _run(build, "dpbam", args)


def run_function(
    function: Callable[..., None], prog: str, args: Sequence[str] | None = None
) -> int:
    """Run a function with typer's annotations as a program, with the help and errors of ``dpbam``.

    Args:
        function: the program; its docstring is the help, with examples as :mod:`dpbam.app.cli.app`
            reads them.
        prog: what starts it, such as ``python -m reproduce``.
        args: of the command line; None: the process's own.

    Returns:
        The exit code: 2 after an error that the user can fix, shown as one sentence.
    """

    def build() -> Any:
        from dpbam.app.cli.app import single

        return single(prog, function)

    return _run(build, prog, args)


def _run(build: Callable[[], Any], prog: str, args: Sequence[str] | None) -> int:
    def run() -> int:
        words = None if args is None else list(args)
        result = build().main(args=words, prog_name=prog, standalone_mode=False)
        return result if isinstance(result, int) else 0

    return guarded(run)
