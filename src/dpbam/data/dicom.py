"""DICOM files: pixels as a reader sees them, and whose they are. Needs the extra ``dicom``.

=========================  ========================================================================
rescale                    the modality LUT, else slope and intercept: values in their own unit
window                     the one that is given (linear), the same for every file; else the
                           file's first window (linear, linear exact or sigmoid), else its VOI LUT,
                           else the whole range that its stored bits can hold
photometric                MONOCHROME1 is inverted, so that dense tissue is bright in every file;
                           RGB and YBR of 8 bits become RGB; palettes are refused
frames                     one: several are refused
compression                what the installed decoders read; otherwise the package is named
=========================  ========================================================================

All of it depends on one file alone: nothing is fitted to a data set. The patient identifier is read
into a column, and goes nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import DataError, Pixels, Window, require

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".dcm", ".dicom")
_MAGIC = b"DICM"  # after 128 bytes that may be anything
_COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_GREY = ("MONOCHROME1", "MONOCHROME2")


class Header(NamedTuple):
    """What is read of a file before its pixels."""

    patient: str  # empty if there is none
    windowed: bool


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM: by its suffix, else by the four letters that mark one."""
    if path.suffix.lower() in SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == _MAGIC and path.name.upper() != "DICOMDIR"
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """Return the patient and whether there is a window; refuse a file that cannot be used."""
    with _open(path, str(path), pixels=False) as data:
        patient = str(data.get("PatientID") or "").strip(" \0")
        return Header(patient, "WindowWidth" in data or "VOILUTSequence" in data)


def read_image(path: Path, window: Window | None = None, where: str | None = None) -> Image.Image:
    """Return a file's one image with 8 bits per channel, grey or RGB.

    Args:
        path: of the file.
        window: centre and width to show grey values by; None: the file's own.
        where: the file's name in an error; None: its path.
    """
    where = where or str(path)
    with _open(path, where, pixels=True) as data:
        stored = np.asarray(data.pixel_array)
        colour = data.PhotometricInterpretation in _COLOUR
        levels = stored.astype(np.uint8) if colour else _grey(stored, data, window, where)
        image: Image.Image = require("PIL.Image", "reading image files").fromarray(levels)
        return image


@contextmanager
def _open(path: Path, where: str, *, pixels: bool) -> Iterator[Any]:
    """Open a file that can be used; every error names it."""
    try:
        import pydicom
        from pydicom import config
    except ImportError:
        raise DataError(f"{where} is a DICOM file: pip install 'dpbam[dicom]' to read it") from None
    config.settings.reading_validation_mode = config.IGNORE  # its warnings quote values
    try:
        data = pydicom.dcmread(path, stop_before_pixels=not pixels, force=False)
        _check(data, where)
        yield data
    except (DataError, MemoryError, ImportError):
        raise
    except Exception as error:  # a damaged file can fail in any way, in any decoder
        kind = type(error).__name__  # its text may quote the file, and so a patient
        raise DataError(f"{where} cannot be read as DICOM ({kind}): it may be damaged") from error


def _check(data: Any, where: str) -> None:
    """Refuse a file without exactly one image that can be decoded and shown."""
    rows, columns = int(data.get("Rows") or 0), int(data.get("Columns") or 0)
    if not rows or not columns:
        raise DataError(f"{where} has no image: leave reports and other objects out of the folder")
    if (frames := int(data.get("NumberOfFrames") or 1)) > 1:
        raise DataError(
            f"{where} has {frames} frames: write each as a file of its own, with its patient"
        )
    largest = require("PIL.Image", "reading image files").MAX_IMAGE_PIXELS
    if largest and rows * columns > largest:
        raise DataError(f"{where} claims {rows}x{columns} pixels, which is too large: shrink it")
    kind = str(data.get("PhotometricInterpretation") or "none")
    if kind not in (*_GREY, *_COLOUR):
        raise DataError(f"{where} has the photometric interpretation {kind}: convert it to grey")
    if kind in _COLOUR and int(data.BitsAllocated) != 8:
        raise DataError(f"{where} has colours of {data.BitsAllocated} bits: convert them to 8")
    _check_decoder(data, where)


def _check_decoder(data: Any, where: str) -> None:
    from pydicom.pixels.decoders.base import get_decoder

    syntax = data.file_meta.TransferSyntaxUID
    try:
        available = get_decoder(syntax).is_available
    except NotImplementedError:
        raise DataError(f"{where} is compressed as {syntax.name}, which no decoder reads") from None
    if not available:
        raise DataError(
            f"{where} is compressed as {syntax.name}, for which no decoder is installed: pip "
            "install 'pylibjpeg[all]'"
        )


def _grey(stored: NDArray[Any], data: Any, window: Window | None, where: str) -> Pixels:
    """Return 0..255: rescaled, windowed, and inverted where 0 is white."""
    from pydicom.pixels.processing import apply_modality_lut

    values = np.asarray(apply_modality_lut(stored, data), dtype=np.float64)
    shown = _apply_window(values, data, where) if window is None else _linear(values, *window)
    level = 1 - shown if data.PhotometricInterpretation == "MONOCHROME1" else shown
    return np.asarray((255 * level.clip(0, 1)).round(), dtype=np.uint8)


def _apply_window(x: NDArray[np.float64], data: Any, where: str) -> NDArray[np.float64]:
    """Map values to 0 .. 1 and beyond, by formulas of the standard (PS3.3, C.11.2.1)."""
    if "WindowWidth" in data:
        c, w = (float(np.ravel(data[k].value)[0]) for k in ("WindowCenter", "WindowWidth"))
        function = str(data.get("VOILUTFunction") or "LINEAR")
        if w <= 0 or (function == "LINEAR" and w < 1):
            raise DataError(f"{where} has a window of width {w:g}: it must be at least 1")
        if function == "SIGMOID":
            return np.asarray(1 / (1 + np.exp(-4 * (x - c) / w)))
        if function == "LINEAR_EXACT":
            return (x - c) / w + 0.5
        return _linear(x, c, w)
    if "VOILUTSequence" in data:
        from pydicom.pixels.processing import apply_voi

        bits = int(data.VOILUTSequence[0].LUTDescriptor[2])
        mapped = np.asarray(apply_voi(x.astype(np.int64), data), dtype=np.float64)
        return np.asarray(mapped / (2**bits - 1))
    low, high = _range(data)
    return (x - low) / (high - low)


def _linear(x: NDArray[np.float64], c: float, w: float) -> NDArray[np.float64]:
    return (x - (c - 0.5)) / max(w - 1, 1e-9) + 0.5


def _range(data: Any) -> tuple[float, float]:
    """Return the least and the largest value that the stored bits can hold, rescaled."""
    bits = int(data.BitsStored)
    if "ModalityLUTSequence" in data:
        return 0.0, 2.0 ** int(data.ModalityLUTSequence[0].LUTDescriptor[2]) - 1
    first = -(2 ** (bits - 1)) if int(data.PixelRepresentation) else 0
    slope, intercept = float(data.get("RescaleSlope", 1)), float(data.get("RescaleIntercept", 0))
    ends = slope * first + intercept, slope * (first + 2**bits - 1) + intercept
    return min(ends), max(ends)
