"""Reads the batch files of CIFAR and ImageNet32, which are pickles, without trusting them.

A pickle can name any function of any module and have it called. Here the names it may use are a
short list, and none of them is the real thing: each stands for an inert class below, which takes
bytes, a type and a shape and nothing else. So nothing in the file decides what code runs, not even
numpy's own unpickling. What comes out is a dict of arrays, lists, strings and numbers.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import DataError
from dpbam.errors import ArgumentError

_TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "b1")


def load_batch(path: Path) -> dict[str, Any]:
    """The dict in one batch file; numpy arrays as such.

    Raises:
        DataError: if the file is not a readable pickle, or names anything outside the list.
    """
    try:
        content = _Unpickler(path.read_bytes(), path).load()
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(
            f"{path} is not a readable batch file ({error}): it may be truncated or damaged"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__} instead of a dict of arrays")
    return {_text(key): _plain(value) for key, value in content.items()}


class _DType:
    """Stands for numpy.dtype: a type code and a byte order, both from a list."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = _text(code).lstrip("|<>=")
        if self.code not in _TYPES:
            raise ArgumentError(f"arrays of type {code!r} are not allowed")
        self.order = "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if _text(state[1]) == ">" else "<"

    def real(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.code)


class _Array:
    """Stands for numpy.ndarray; its state is (version, shape, type, Fortran order, bytes)."""

    value: NDArray[Any] | None = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _from_bytes(raw, dtype, shape, "F" if fortran else "C")


class _FromBuffer:
    """Stands for numpy's _frombuffer(bytes, type, shape, order), which newer pickles use."""

    def __init__(self, raw: Any, dtype: _DType, shape: tuple[int, ...], order: str) -> None:
        self.value = _from_bytes(raw, dtype, shape, order)

    def __setstate__(self, state: object) -> None:
        raise ArgumentError("an array has its state already")


class _Scalar(_FromBuffer):
    """Stands for numpy's scalar(type, bytes)."""

    def __init__(self, dtype: _DType, raw: Any) -> None:
        super().__init__(raw, dtype, (), "C")


class _Latin1:
    """Stands for _codecs.encode(text, "latin1"), which is how old protocols write bytes."""

    def __init__(self, text: str, encoding: str) -> None:
        if encoding != "latin1":
            raise ArgumentError(f"encoding {encoding!r} is not allowed")
        self.raw = text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        raise ArgumentError("bytes have no state")


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler in Python: C's makes room for whatever place a file names in its memo.

    Reading from bytes, no opcode takes more memory than the file has, once BYTEARRAY8 reads before
    it makes room.
    """

    read: Any  # of the content; the parent sets both when it loads
    append: Any  # to its stack

    def load_bytearray8(self) -> None:
        """Its length is eight bytes; what is not there is not read."""
        length = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(length)))

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }
    allowed: ClassVar[dict[tuple[str, str], type]] = {
        **{
            (f"numpy.{core}.{module}", name): stand_in
            for core in ("core", "_core")
            for module, name, stand_in in (
                ("multiarray", "_reconstruct", _Array),
                ("multiarray", "scalar", _Scalar),
                ("numeric", "_frombuffer", _FromBuffer),
            )
        },
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _DType,
        ("_codecs", "encode"): _Latin1,
    }

    def __init__(self, content: bytes, path: Path) -> None:
        # encoding: Python 2 strings, which are pixels, and the dict's keys
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._path = path

    def find_class(self, module: str, name: str) -> type:
        """The stand-in for a name on the list."""
        if (module, name) not in self.allowed:
            raise DataError(
                f"{self._path} asks for {module}.{name}, which no data set needs: it was refused, "
                "because such a file can run any code; get it from the official source"
            )
        return self.allowed[module, name]


def _from_bytes(raw: Any, dtype: _DType, shape: tuple[int, ...], order: str) -> NDArray[Any]:
    data = raw.raw if isinstance(raw, _Latin1) else raw
    return np.frombuffer(data, dtype.real()).reshape(shape, order="F" if order == "F" else "C")


def _plain(value: Any) -> Any:
    """Stand-ins to what they stand for; lists entry by entry."""
    if isinstance(value, list):
        if any(isinstance(entry, list) for entry in value):  # a few bytes can nest to any size
            raise DataError("a batch file holds lists within lists: no data set needs them")
        return [_plain(entry) for entry in value]
    if isinstance(value, _Array | _FromBuffer):
        if getattr(value, "value", None) is None:
            raise DataError("a batch file holds an array without content: it may be damaged")
        return value.value
    raw = value.raw if isinstance(value, _Latin1) else value
    return _text(raw) if isinstance(raw, bytes) else raw


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
