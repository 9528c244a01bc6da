"""Any ONNX image encoder as frozen public features: ``onnx:FILE``.

The session runs on one row at a time: it is called once per record, with a batch of one, so that no
operator can mix records whatever the graph contains. A graph that draws random numbers would make
features depend on what was computed before; it is refused.

Next to the file is a ``preprocessor_config.json``, as image models have it: size, mean and
deviation of the channels. Needs ``dpbam[onnx]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbam.errors import ArgumentError
from dpbam.nn.encoders import Preprocessing, file_digest, resizing

ONNX = "onnx:"
_CONFIG = "preprocessor_config.json"


class OnnxFeatures:
    """The output of an ONNX encoder, for images as :func:`dpbam.data.to_float` makes them.

    Args:
        path: the ``.onnx`` file; weights that it keeps in other files are found next to it.
        image_shape: (C, H, W) of the images; grey ones are repeated to the encoder's channels.
        threads: processor threads of one pass.

    Guarantee: row i of ``extract`` depends on image i, the encoder's files and the version of
    onnxruntime alone.

    Assumptions: the files are public; onnxruntime keeps no values between two runs of a session
    except the state of random operators, which :meth:`_check` looks for.

    Proof: the session gets one row per run, resized and normalised by matrices that depend on the
    preprocessing's constants alone; a graph is refused whose two passes over one synthetic row,
    with another row between them, differ in a bit.

    Raises:
        ValueError: if the file cannot be used; one sentence.
    """

    def __init__(
        self, path: Path | str, image_shape: tuple[int, int, int], *, threads: int = 1
    ) -> None:
        self.path = Path(path).expanduser()
        self.image_shape = image_shape
        self.preprocessing = _preprocessing(self.path)
        self._files = _digests(self.path)
        self._version, self._session = _session(self.path, threads)
        p = self.preprocessing
        if image_shape[0] not in (1, len(p.mean)):
            raise ArgumentError(
                f"the encoder takes images of {len(p.mean)} channels, and the data has "
                f"{image_shape[0]}: convert them with --channels"
            )
        self._rows = resizing(image_shape[1], p.height, p.resample)
        self._columns = resizing(image_shape[2], p.width, p.resample)
        mean, std = (torch.tensor(v)[:, None, None] for v in (p.mean, p.std))
        self._scale, self._shift = 0.5 / std, (0.5 - mean) / std
        self.width = self._check()

    def extract(self, images: Tensor) -> Tensor:
        if not len(images):
            return torch.empty(0, self.width)
        return torch.cat([self._one(image[None]) for image in images.float().cpu()])

    def description(self) -> Mapping[str, Any]:
        return {
            "features": "onnx", "files": self._files, "onnxruntime": self._version,
            "preprocessing": asdict(self.preprocessing), "image_shape": self.image_shape,
        }  # fmt: skip

    def _one(self, image: Tensor) -> Tensor:
        """Return [1, D] of one image [1, C, H, W]."""
        resized = self._rows @ image @ self._columns.T
        pixels = (resized * self._scale + self._shift).numpy()
        try:
            values = self._session.run(None, {self._session.get_inputs()[0].name: pixels})[0]
        except Exception as error:  # onnxruntime has many classes
            raise ArgumentError(
                f"{self.path} does not run on one image {list(pixels.shape)}: "
                f"{str(error).strip().splitlines()[0]}"
            ) from None
        return torch.from_numpy(np.asarray(values, np.float32).reshape(len(values), -1))

    def _check(self) -> int:
        """Run two synthetic rows, refuse what is random or not one row, and return D."""
        generator = torch.Generator().manual_seed(0)
        a, b = torch.rand(2, 1, *self.image_shape, generator=generator) * 2 - 1
        first, _, repeated = self._one(a), self._one(b), self._one(a)
        if len(first) != 1 or not torch.equal(first, repeated):
            raise ArgumentError(
                f"{self.path} gives {'another' if len(first) == 1 else 'more than one'} row of "
                "features for the same image: only a graph without random operators, exported for "
                "inference, can be an encoder"
            )
        return first.shape[1]


def _session(path: Path, threads: int) -> tuple[str, Any]:
    try:
        import onnxruntime
    except ImportError:
        raise ArgumentError(
            "ONNX encoders need the package onnxruntime: pip install 'dpbam[onnx]'"
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever a wrong file leads to
        reason = str(error).strip().splitlines()[0]
        raise ArgumentError(f"the encoder {path} cannot be loaded: {reason}") from None
    if len(session.get_inputs()) != 1:
        names = ", ".join(i.name for i in session.get_inputs())
        raise ArgumentError(f"the encoder {path} must have one input, the images, and has {names}")
    return onnxruntime.__version__, session


def _preprocessing(path: Path) -> Preprocessing:
    if not path.is_file():
        raise ArgumentError(f"there is no file {str(path)!r} with an encoder")
    config = path.parent / _CONFIG
    if not config.is_file():
        raise ArgumentError(
            f"{path} needs a {_CONFIG} next to it, with size, image_mean and image_std: how the "
            "encoder wants its images cannot be read from the file itself"
        )
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ArgumentError(f"{config} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ArgumentError(f"{config} must hold a JSON object, not {type(values).__name__}")
    return Preprocessing.read(values, config)


def _digests(path: Path) -> dict[str, str]:
    """Return SHA-256 of the file and of all files that it may read its weights from.

    The graph holds the relative path of such a file as plain text, so every file below the folder
    whose path occurs in it is taken: one too many does no harm.
    """
    graph = path.read_bytes()
    others = (f for f in path.parent.rglob("*") if f.is_file() and f != path)
    named = {f.relative_to(path.parent).as_posix(): f for f in others}
    external = {name: f for name, f in named.items() if name.encode() in graph}
    return {path.name: file_digest(path)} | {n: file_digest(f) for n, f in sorted(external.items())}
