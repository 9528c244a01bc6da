"""Ctrl-C and SIGTERM: finish the step, then stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def graceful(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Inside, the first signal makes the yielded function true; a second acts as it always does.

    Example:
        >>> with graceful(print) as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop()
        stopping after this step, with a checkpoint; once more stops at once
        True
    """
    asked = False
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        restore()
        say("stopping after this step, with a checkpoint; once more stops at once")

    if threading.current_thread() is threading.main_thread():  # others cannot set handlers
        before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield lambda: asked
    finally:
        restore()
