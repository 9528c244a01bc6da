"""Ctrl-C at a chosen line of a function."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def interrupt_at(
    line: int, names: tuple[str, ...], call: Callable[[], object], *, code_of: ModuleType
) -> bool:
    """Call with Ctrl-C before the given line of these functions, counted as they run.

    They are those of a module, and mistakes of that name that a test has planted.
    """
    lines = itertools.count()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        file = frame.f_code.co_filename
        if frame.f_code.co_name not in names or (
            file != code_of.__file__ and "tests/claims" not in file
        ):
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
