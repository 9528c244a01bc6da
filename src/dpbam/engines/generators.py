"""Generators of random numbers that a pass must not move: they would count the passes.

Their number follows the size of the batch. Under a public seed, a model that draws from Python's or
NumPy's generator draws other numbers in the next step if one record more was in this one. Draws by
torch's functions are keyed by the record.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from dpbam.engines.base import StatefulModelError

_MT19937 = 624 * 4 + 4  # bytes of NumPy's state: the words, and the place of the next
_PYTHON_BYTES = (1 + 624) * 4
_python: Any = random._inst
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def generator_state(generator: Any) -> bytes:
    """Return what the next draws of one of ``GENERATORS`` depend on."""
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state())
    return bytes(generator.get_state().numpy().tobytes())


class _Generator(NamedTuple):
    """A global generator: its name, and how its state is read, compared and restored."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], None]


def _of_numpy() -> bytes:
    """Return the state of NumPy's global generator, from its memory where it is the usual one.

    ``np.random.get_state`` takes 150 microseconds, this takes one. It leaves out the second normal
    number, which a draw of the first keeps: the next pass that draws one moves the rest.
    """
    bits = np.random.mtrand._rand._bit_generator
    if type(bits) is np.random.MT19937:
        return ctypes.string_at(bits.ctypes.state_address, _MT19937)
    return pickle.dumps(bits.state)


def _restore_numpy(state: bytes) -> None:
    bits = np.random.mtrand._rand._bit_generator
    if type(bits) is np.random.MT19937:
        ctypes.memmove(bits.ctypes.state_address, state, _MT19937)
    else:
        bits.state = pickle.loads(state)  # written above, in this process


def _of_python() -> tuple[bytes, float | None] | tuple[Any, ...]:
    """Return the state of Python's global generator, from its memory where that is understood."""
    if _PYTHON_AT is None:
        return random.getstate()
    return ctypes.string_at(_PYTHON_AT, _PYTHON_BYTES), _python.gauss_next


def _restore_python(state: Any) -> None:
    if _PYTHON_AT is None:
        random.setstate(state)
        return
    ctypes.memmove(_PYTHON_AT, state[0], _PYTHON_BYTES)
    _python.gauss_next = state[1]


def _python_memory() -> int | None:
    """Return where the words of Python's global generator are, or None where it looks different.

    ``random.getstate`` makes 625 Python numbers at each call: a hundredth of a small step.
    """
    at = id(_python) + object.__basicsize__  # CPython: the place of the next word, and the words
    try:
        *words, place = _python.getstate()[1]
        memory = np.frombuffer(ctypes.string_at(at, _PYTHON_BYTES), np.uint32).tolist()
    except Exception:
        return None
    return at if memory == [place, *words] else None


def _of_torch() -> bytes:
    return bytes(torch.default_generator.get_state().numpy().tobytes())


def _restore_torch(state: bytes) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_PYTHON_AT = _python_memory() if sys.implementation.name == "cpython" else None
_GLOBAL = (
    _Generator("Python's", _of_python, _restore_python),
    _Generator("NumPy's", _of_numpy, _restore_numpy),
    _Generator("torch's", _of_torch, _restore_torch),
)


class GlobalGenerators:
    """The states of the global generators of Python, NumPy and torch, before a pass."""

    def __init__(self) -> None:
        self._before = [generator.read() for generator in _GLOBAL]

    def check(self) -> None:
        """Refuse a pass that has moved one of them, and restore it.

        Restored, it does not carry the number of passes into what is drawn later.
        """
        for generator, before in zip(_GLOBAL, self._before, strict=True):
            if generator.read() != before:
                generator.restore(before)
                raise StatefulModelError(
                    f"the forward pass moves {generator.name} global generator of random numbers, "
                    "so that the number of records in one step could change what the next one "
                    "draws: draw in forward with torch's functions (torch.nn.Dropout, "
                    "torch.rand_like), which are keyed by the record, or draw before the training "
                    "(if another thread draws meanwhile, give it a generator of its own)"
                )
