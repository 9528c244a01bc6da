"""Make three small data sets, one per task, of images that come with scikit-learn.

    python examples/make_task_data.py FOLDER

writes into FOLDER:

- ``two-digits.npz`` (multi-label): two handwritten digits side by side, which are the findings.
- ``shapes/`` (segmentation): discs and squares on patches of photographs, with their masks.
- ``discs/`` (regression): one disc on such a patch; ``labels.csv`` has its diameter in pixels, and
  the patient, who has two images.

Training and test images come from different digits, and from different halves of the photographs.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from dpbam.data import load

Pixels = NDArray[np.uint8]
SIDE = 32
COUNTS = {"train": 3000, "test": 600}


def two_digits(folder: Path, rng: np.random.Generator) -> None:
    """Draw pairs of digits; findings 0..9 are whether a digit occurs."""
    arrays: dict[str, NDArray[np.uint8]] = {}
    for split, count in COUNTS.items():
        digits = load("digits", split=split)
        chosen = rng.choice(len(digits) ** 2, count, replace=False)  # no pair occurs twice
        pairs = np.stack(np.divmod(chosen, len(digits)), axis=1)
        images = digits.images.read(pairs.reshape(-1)).reshape(count, 2, 8, 8)
        findings = np.zeros((count, 10), np.uint8)
        np.put_along_axis(findings, digits.labels[pairs], 1, axis=1)
        arrays[f"{split}_images"] = np.concatenate([images[:, 0], images[:, 1]], axis=2)
        arrays[f"{split}_labels"] = findings
    np.savez_compressed(folder / "two-digits.npz", **arrays)


def patches(split: str, count: int, rng: np.random.Generator) -> Pixels:
    """Cut grey patches out of two photographs: their left halves, or for the test their right."""
    photographs = [np.asarray(Image.fromarray(p).convert("L")) for p in load_sample_images().images]
    cut = []
    for k in range(count):
        photograph = photographs[k % len(photographs)]
        half = photograph.shape[1] // 2
        left = int(rng.integers(0, half - SIDE)) + (0 if split == "train" else half)
        top = int(rng.integers(0, photograph.shape[0] - SIDE))
        cut.append(photograph[top : top + SIDE, left : left + SIDE])
    return np.stack(cut)


def shape(rng: np.random.Generator, radius: float, *, square: bool) -> NDArray[np.bool_]:
    """Place a disc or a square at random."""
    y, x = np.mgrid[:SIDE, :SIDE] - rng.uniform(radius, SIDE - radius, 2)[:, None, None]
    distance = np.maximum(abs(y), abs(x)) if square else np.hypot(y, x)
    return distance < radius


def draw(patch: Pixels, where: NDArray[np.bool_], light: float) -> Pixels:
    """Lighten the texture inside the shape."""
    lighter = patch + light * (255.0 - patch)
    return np.where(where, lighter, patch).astype(np.uint8)


def segmentation(folder: Path, rng: np.random.Generator) -> None:
    """Draw a disc and a square, which may hide the disc, on each patch."""
    for split, count in COUNTS.items():
        for kind in ("images", "masks"):
            (folder / "shapes" / split / kind).mkdir(parents=True, exist_ok=True)
        for k, patch in enumerate(patches(split, count, rng)):
            image, mask = patch, np.zeros((SIDE, SIDE), np.uint8)
            for number in (1, 2):
                where = shape(rng, rng.uniform(4, 8), square=number == 2)
                image, mask[where] = draw(image, where, rng.uniform(0.4, 0.7)), number
            Image.fromarray(image).save(folder / "shapes" / split / "images" / f"{k:04d}.png")
            Image.fromarray(mask).save(folder / "shapes" / split / "masks" / f"{k:04d}.png")
    (folder / "shapes" / "classes.txt").write_text("background\ndisc\nsquare\n")


def regression(folder: Path, rng: np.random.Generator) -> None:
    """Draw a disc on each patch, and list its diameter."""
    target = folder / "discs"
    target.mkdir(exist_ok=True)
    with (target / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "diameter", "patient", "split"])
        for split, count in COUNTS.items():
            for k, patch in enumerate(patches(split, count, rng)):
                radius = rng.uniform(3, 12)
                image = draw(patch, shape(rng, radius, square=False), 0.6)
                name = f"{split}-{k:04d}.png"
                Image.fromarray(image).save(target / name)
                table.writerow([name, f"{2 * radius:.1f}", f"{split}-{k // 2}", split])


def main(folder: str) -> None:
    """Make all three."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for make in (two_digits, segmentation, regression):
        make(Path(folder), np.random.default_rng(0))


if __name__ == "__main__":
    main(sys.argv[1])
