"""Features of the study's data sets, computed once: seconds for a study, minutes for these.

    python -m reproduce.defaults_features PACKAGES FOLDER KIND[=SPEC] SOURCE ...

KIND names the files; SPEC is a name for :func:`dpbam.features.make_features` (``scattering``,
``onnx:FILE``, ``hf:FOLDER``). A file that is there is not computed again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from dpbam.data import to_float
from dpbam.features import make_features, standardise_rows
from reproduce.defaults_data import build

_ROWS = 512


def compute(folder: Path, source: str, kind: str, spec: str, most: dict[str, int]) -> None:
    """Write SOURCE-PART-KIND.npy, standardised features float32 [N, D], and the labels."""
    for part in ("train", "test"):
        path = folder / f"{source}-{part}-{kind}.npy"
        with np.load(folder / f"{source}-{part}.npz") as values:
            x, y = values["x"], values["y"]
        np.save(folder / f"{source}-{part}-labels.npy", y)
        if path.exists():
            continue
        x = x[: most.get(part, len(x))]
        features = make_features(spec, x.shape[1:])
        blocks = [
            standardise_rows(features.extract(to_float(torch.from_numpy(x[k : k + _ROWS]))))
            for k in range(0, len(x), _ROWS)
        ]
        temporary = path.with_suffix(".tmp.npy")
        np.save(temporary, torch.cat(blocks).numpy())
        temporary.rename(path)
        print(path.name, len(x), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    packages, folder = Path(sys.argv[1]), Path(sys.argv[2])
    kind, _, spec = sys.argv[3].partition("=")
    for argument in sys.argv[4:]:
        source, *limits = argument.split(":")
        build(source, packages, folder)
        most = dict(zip(("train", "test"), map(int, limits), strict=False))
        compute(folder, source, kind, spec or kind, most)
