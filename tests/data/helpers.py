"""Small data sets in the official layouts."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

PIXELS = 3072


def random_pixels(n: int, seed: int = 0, shape: tuple[int, ...] = (PIXELS,)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def binary_cifar(n: int, classes: int, seed: int = 0) -> tuple[bytes, np.ndarray, np.ndarray]:
    """One binary batch: its bytes, pixels and labels. 100 classes have a superclass byte first."""
    pixels = random_pixels(n, seed)
    labels = (np.arange(n) % classes).astype(np.uint8)
    lead = [labels[:, None]] if classes == 10 else [labels[:, None] % 20, labels[:, None]]
    return np.concatenate([*lead, pixels], 1).tobytes(), pixels, labels


def write_cifar10(folder: Path, n: int = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (folder / f"{name}.bin").write_bytes(binary_cifar(n, 10, seed=k)[0])
    return folder


def tar_of(files: dict[str, bytes], path: Path) -> str:
    """Write a .tar.gz and return its md5."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_imagenet32(folder: Path, per_file: int = 4) -> np.ndarray:
    """The eleven files; returns the training pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = []
    for k, name in enumerate([*(f"train_data_batch_{i}" for i in range(1, 11)), "val_data"]):
        pixels = random_pixels(per_file, seed=k)
        labels = [(k * per_file + i) % 1000 + 1 for i in range(per_file)]
        np.savez(folder / f"{name}.npz", data=pixels, labels=labels, mean=pixels.mean(0))
        everything.append(pixels)
    return np.concatenate(everything[:-1]).reshape(-1, 3, 32, 32)


def write_image(
    path: Path, *, mode: str = "L", size: tuple[int, int] = (8, 8), seed: int = 0
) -> np.ndarray:
    """A random image of (width, height) ``size``; returns its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = random_pixels(size[1], seed, (size[0], *channels))
    Image.fromarray(pixels).save(path)
    return pixels
