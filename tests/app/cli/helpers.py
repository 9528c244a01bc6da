"""What the command line's tests share: bad data on disk, and a look at a folder's content."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from PIL import Image

QUICK = ["--data", "digits", "--model", "mlp", "--method", "dp-sgd", "--batch-size", "64",
         "--accountant", "rdp", "--epochs", "0.1", "--noise-multiplier", "1"]  # fmt: skip


def one_sentence(ended, says):
    """The command failed as a user's error should: code 2, one line on stderr, no traceback."""
    lines = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
    assert ended.code == 2, ended.err
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    assert says in lines[0]


def snapshot(folder: Path) -> dict[str, str]:
    """Every file under ``folder`` and a hash of it; lock files, which hold nothing, left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def images(n=40, size=8):
    return np.random.default_rng(0).integers(0, 255, (n, size, size), dtype=np.uint8)


def npz(path: Path, **arrays) -> Path:
    np.savez(path, **({"images": images(), "labels": np.arange(40) % 2} | arrays))
    return path


def folder(path: Path, sizes=((8, 8),) * 6) -> Path:
    """Two classes, the images of these sizes in turn."""
    for k, (h, w) in enumerate(sizes):
        place = path / ("ill", "well")[k % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(k).integers(0, 255, (h, w), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{k}.png")
    return path
