"""Where errors end: one sentence for what a user can fix, a traceback for a bug in dpbam.

===============================================  ===================================  =========
what was raised                                  what is shown                        exit code
===============================================  ===================================  =========
a wrong flag or value (typer's errors)           its sentence                         2
a ``dpbam.errors.DPBAMError``                    its sentence                         2
OSError: a full disk, a missing file             the system's message, and the file   2
out of memory                                    what to make smaller                 2
Ctrl-C                                           (the command printed how to resume)  130
anything else                                    a traceback: it is a bug in dpbam    1
===============================================  ===================================  =========

``DPBAM_TRACEBACK=1`` in the environment shows the traceback of every error.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from dpbam.errors import DPBAMError

USER_ERROR, BUG, INTERRUPTED = 2, 1, 130


def guarded(command: Callable[[], int]) -> int:
    """Run ``command`` and turn what it raises into a message on stderr and an exit code."""
    try:
        with _warnings_as_sentences():
            return command()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        return 0
    except Exception as error:
        sentence = user_sentence(error)
        if sentence is None or os.environ.get("DPBAM_TRACEBACK"):
            traceback.print_exc()
        if sentence is None:
            print("error: this is a bug in dpbam, please report it", file=sys.stderr)
            return BUG
        if sentence:  # empty: a group without a command has shown its help
            print(f"error: {sentence}", file=sys.stderr)
        return USER_ERROR


def user_sentence(error: Exception) -> str | None:
    """Return the message for the user, in one line; None if ``error`` is a bug in dpbam.

    Example:
        >>> user_sentence(FileNotFoundError(2, "No such file or directory", "run.toml"))
        'run.toml: No such file or directory'
        >>> user_sentence(KeyError("lost")) is None
        True
    """
    formatted = getattr(error, "format_message", None)  # typer's errors, wherever its click lives
    if callable(formatted):
        return _one_line(str(formatted()))
    if isinstance(error, OSError):
        return _one_line(_about_file(error))
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return "out of memory: take a smaller --physical-batch-size, or a smaller model"
    if isinstance(error, DPBAMError):
        return _one_line(str(error))
    return None


def _about_file(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _is_out_of_memory(error: Exception) -> bool:
    """Whether torch ran out of memory: a class of its own on a GPU, RuntimeError on the CPU."""
    if not isinstance(error, RuntimeError):
        return False
    return "out of memory" in str(error) or "can't allocate memory" in str(error)


def _one_line(message: str) -> str:
    """Remove what would control the terminal: a message may quote a file."""
    from dpbam.app.cli.output import printable

    return printable(" ".join(message.split()))


@contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """Show a UserWarning as a line of its own on stderr, once, without file and line number."""
    shown: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = _one_line(str(message))
        if text not in shown:
            shown.add(text)
            print(f"warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
