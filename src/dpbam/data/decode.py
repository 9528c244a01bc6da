"""Image files, decoded when they are read; errors name the file.

Accepted are PNG, JPEG, BMP, GIF, TIFF, WebP and PNM of 8 bits per channel, up to Pillow's bound
against decompression bombs, and DICOM (:mod:`dpbam.data.dicom`). Grey images of 16 bits are scaled
by their full range, 0..65535 to 0..255. Those of 32 bits are refused: how to map them to 8 bits is
their owner's decision.

Memory: the decoded images of a split are kept if they take at most ``KEPT_BYTES``. Those of a
larger one are decoded each time they are read, so that only the batches in use are in memory.
"""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpbam.data.base import DataError, Images, Indices, Pixels, Window, require
from dpbam.data.dicom import is_dicom, read_image
from dpbam.data.sources import Options

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm", ".pnm")
)
_GREY = ("1", "L", "LA", "La")
_DEEP = ("I", "F")  # 32 bits; "I;16" and its kin begin with I too
_SIXTEEN = ("I;16", "I;16B", "I;16L", "I;16N")
KEPT_BYTES = 2**29  # decoded images of a split are kept in memory if all fit in 512 MiB
_LARGE = 2**14  # pixels: 128 x 128
_PROBED = 32  # images whose headers determine the common size and whether the set is grey


class DecodedImages(Images):
    """Images that are decoded one at a time, when they are first read.

    Args:
        count: N.
        size: (H, W): every image is resized to it (``resize``) or must have it.
        channels: 1 (grey) or 3 (RGB); every image is converted to it.
        resize: whether other sizes are resized, bilinearly with anti-aliasing, or refused.
    """

    decodes = True
    threads: ClassVar[int] = 1

    def __init__(self, count: int, size: tuple[int, int], channels: int, resize: bool) -> None:
        self.shape = (count, channels, *size)
        self._resize = resize
        self._decoded: dict[tuple[int, ...], Pixels] = {}  # one array, by its shape
        self._known = np.zeros(count, bool)

    @abstractmethod
    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        """Open one image and read its header."""

    def pixels(self, image: Image.Image, where: str) -> Pixels:
        """Return an opened image as uint8 [C, H, W]."""
        return to_pixels(image, self.shape[1:], self._resize, where)

    def check_headers(self) -> None:
        with bombs_refused():
            for index in range(len(self)):
                with self.open(index) as image:
                    _check_size(image, self.shape[2:], self._resize, self.describe(index))

    def used_bits(self, index: int) -> int | None:
        with bombs_refused(), self.open(index) as image:
            return int(np.asarray(image).max()).bit_length() if _has_sixteen(image) else None

    def read(self, indices: Indices) -> Pixels:
        """Decode the images not decoded before; keep them if the whole set is small enough."""
        if np.prod(self.shape, dtype=np.float64) > KEPT_BYTES:
            return self._decode(indices)
        decoded = self._decoded.get(self.shape)
        if decoded is None:  # of several threads that come here, all get the array of one
            decoded = self._decoded.setdefault(self.shape, np.empty(self.shape, np.uint8))
        new = np.unique(indices[~self._known[indices]])
        if new.size:
            decoded[new] = self._decode(new)
            self._known[new] = True
        return decoded[indices]

    def _decode(self, indices: Indices) -> Pixels:
        out = np.empty((len(indices), *self.shape[1:]), np.uint8)

        def one(row: int) -> None:
            index = int(indices[row])
            with self.open(index) as image:
                out[row] = self.pixels(image, self.describe(index))

        # threads help if decoding takes longer than Python's own work: not on thumbnails
        large = self._resize or self.shape[2] * self.shape[3] >= _LARGE
        with bombs_refused():
            if large and self.threads > 1 and len(indices) >= 2 * self.threads:
                with ThreadPoolExecutor(self.threads) as pool:
                    list(pool.map(one, range(len(indices))))
            else:
                for row in range(len(indices)):
                    one(row)
        return out


class FileImages(DecodedImages):
    """Images in files: ``paths`` relative to ``root``, one per record."""

    threads = min(8, os.cpu_count() or 1)  # Pillow releases the GIL while decoding

    def __init__(
        self, root: Path, paths: Sequence[str], size: tuple[int, int], channels: int, resize: bool,
        window: Window | None = None, shown: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(len(paths), size, channels, resize)
        # files are opened by absolute paths, which os.chdir does not change
        self._root, self._paths, self.window = root.resolve(), list(paths), window
        self._shown = shown or root  # as the user named it

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        return open_image(self._root / self._paths[index], self.describe(index), self.window)

    def select(self, indices: Indices) -> Images:
        paths = [self._paths[i] for i in indices]
        size, channels = self.shape[2:], self.shape[1]
        return type(self)(self._root, paths, size, channels, self._resize, self.window, self._shown)

    def describe(self, index: int) -> str:
        return str(self._shown / self._paths[index])

    @property
    def paths(self) -> Sequence[str]:
        return self._paths

    def identities(self) -> list[bytes]:
        return [path.encode("utf-8", "surrogateescape") for path in self._paths]

    def manifest(self) -> bytes:
        """Return every path and size, so that a replaced file is noticed."""
        try:
            lines = [f"{path} {(self._root / path).stat().st_size}" for path in self._paths]
        except OSError as error:
            raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
        return "\n".join(lines).encode("utf-8", "surrogateescape")


def read_images(
    paths: Sequence[str | Path], shape: tuple[int, int, int], window: Window | None = None
) -> Pixels:
    """Decode image files, resized and converted to ``shape`` (C, H, W): uint8 [N, C, H, W].

    DICOM files are shown by ``window``, if it is given.

    Raises:
        DataError: if one is broken; the message has its path.

    Example:
        >>> import tempfile
        >>> import PIL.Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     PIL.Image.new("RGB", (40, 30)).save(f"{folder}/scan.png")
        ...     read_images([f"{folder}/scan.png"], (1, 28, 28)).shape
        (1, 1, 28, 28)
    """
    channels, height, width = shape
    images = FileImages(Path(), list(map(str, paths)), (height, width), channels, True, window)
    return images.read(np.arange(len(paths), dtype=np.int64))


def common_format(
    open_record: Callable[[int], AbstractContextManager[Image.Image]],
    describe: Callable[[int], str],
    count: int,
    options: Options,
    where: str,
) -> tuple[tuple[int, int], int]:
    """Return (H, W) and C of a set: from the options, else from 32 evenly spaced headers.

    While a set is checked all headers are read, and broken ones are reported with the images.

    Raises:
        DataError: if these differ in size and no size is given, or if one is broken.
    """
    findings = options.findings
    probed = count if findings.thorough else min(count, _PROBED)
    sizes: Counter[tuple[int, int]] = Counter()
    examples: dict[tuple[int, int], str] = {}
    grey, error = True, DataError(f"there are no images in {where}")
    with bombs_refused():
        for index in np.linspace(0, count - 1, probed).round().astype(int).tolist():
            try:
                with open_record(index) as image:
                    sizes[image.height, image.width] += 1
                    examples.setdefault((image.height, image.width), describe(index))
                    grey = grey and (image.mode in _GREY or image.mode.startswith(_DEEP))
            except DataError as broken:
                if not findings.thorough:
                    raise
                error = broken
    if not sizes:
        raise error
    findings.sizes += sizes
    if options.size is None and len(sizes) > 1:
        named = ", ".join(f"{h}x{w}: {examples[h, w]}" for h, w in sorted(sizes)[:3])
        problem = f"images of {where} differ in size ({named}): pass --image-size to resize them"
        with findings.collecting():
            raise DataError(problem)
    return options.size or sizes.most_common(1)[0][0], options.channels or (1 if grey else 3)


def _pillow() -> Any:
    return require("PIL.Image", "reading image files")


def to_pixels(image: Image.Image, shape: tuple[int, int, int], resize: bool, where: str) -> Pixels:
    """Return a decoded image as uint8 [C, H, W].

    Args:
        image: of 8 bits per channel, or grey of 16.
        shape: (C, H, W), with C = 1 or 3.
        resize: whether another size is resized or refused.
        where: the image's name in an error.
    """
    channels, size = shape[0], shape[1:]
    pillow = _pillow()
    if _has_sixteen(image):
        image = pillow.fromarray(
            (np.asarray(image) / 257.0).round().astype(np.uint8)
        )  # 65535 / 255
    if image.mode.startswith(_DEEP):
        raise DataError(
            f"{where} has 32 bits per pixel (mode {image.mode}): convert it to 8 or 16 bits first"
        )
    _check_size(image, size, resize, where)
    converted = image.convert("L" if channels == 1 else "RGB")
    if (image.height, image.width) != size:
        converted = converted.resize((size[1], size[0]), pillow.Resampling.BILINEAR)
    pixels: Pixels = np.asarray(converted, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _check_size(image: Image.Image, size: tuple[int, ...], resize: bool, where: str) -> None:
    if (image.height, image.width) != size and not resize:
        raise DataError(
            f"{where} is {image.height}x{image.width} where others are {size[0]}x{size[1]}: "
            "pass --image-size to resize them"
        )


def _has_sixteen(image: Image.Image) -> bool:
    """Whether an image is grey of 16 bits; some versions of Pillow open such a PNG as of 32."""
    return image.mode in _SIXTEEN or (image.mode == "I" and image.format == "PNG")


@contextmanager
def open_image(
    source: Any, where: str | None = None, window: Window | None = None
) -> Iterator[Image.Image]:
    """Open an image, a path or a file object named ``where``; every error names it."""
    call = where or str(source)
    if isinstance(source, Path) and source.suffix.lower() not in SUFFIXES and is_dicom(source):
        yield read_image(source, window, call)
        return
    pillow = _pillow()
    try:
        with pillow.open(source, formats=FORMATS) as image:
            yield image
    except DataError:
        raise
    except pillow.UnidentifiedImageError as error:
        raise DataError(f"{call} is not an image that can be read: it may be damaged") from error
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise DataError(
            f"{call} is too large ({error}): images above {pillow.MAX_IMAGE_PIXELS} pixels are "
            "refused, so shrink it first"
        ) from error
    except Exception as error:  # a damaged image can fail in any way, in any decoder
        raise DataError(f"{call} cannot be read ({error}): it may be damaged") from error


@contextmanager
def bombs_refused() -> Iterator[None]:
    """Turn Pillow's warning about decompression bombs into an error, in every thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", _pillow().DecompressionBombWarning)
        yield
