"""A linear head on fixed features, as a model of images, and the features of a data set.

``scattering``, ``onnx:FILE`` and others: a head is trained on features that were computed once, and
predicts from images. What the features are computed with is among its tensors (the axes of
scattering, the bytes of an ONNX graph, the weights of an encoder), so that the saved model needs no
other file. The head begins at zero: nothing is drawn.

A record's features are a function of that record alone and of public constants: an encoder runs in
eval on one row at a time (by vmap), with the resizing and normalisation of its own files. So the
head's private training on features is private training on the records. They are computed without
noise: their files are in ``non-private/``. A file is named by a digest of all that its values
depend on: every pixel of every record, the encoder's tensors and architecture, its preprocessing,
the version of torch and the kind of device. So a changed record never meets stale features, and
runs may share a folder (``feature_cache``): a file appears there complete, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpbam._names import FEATURES, ONNX, SCATTERING, public_name
from dpbam.app.runs.facts import weights_digest
from dpbam.app.runs.files import write_json
from dpbam.data import DataSet, Images, to_float
from dpbam.data.fetch import atomic
from dpbam.engines.isolation import over_rows
from dpbam.errors import ArgumentError
from dpbam.features import (
    HEAD_SCALE,
    EncoderFeatures,
    Features,
    OnnxFeatures,
    ScatteringFeatures,
    cached_features,
    recentre_rows,
    standardise_rows,
)
from dpbam.features.cache import holds_features
from dpbam.features.scattering import Axes
from dpbam.heads import LinearHead, MomentHead
from dpbam.nn.encoders import PublicEncoder, described_encoder
from dpbam.params import device_of, evaluating

_AXES = ("mean", "project", "sign")
_FILE = "file{}"  # the name of a buffer that holds a file's bytes
_ROWS = 64  # computed at once
_CENTRED = 4096  # moved to their centre at once


class FeatureModel(nn.Module):
    """Standardised fixed features and a linear head that begins at zero.

    Args:
        features: computes a record's features from its image alone.
        num_outputs: of the head.
        constants: the tensors or the module that the features are computed with, by name.
        description: what :func:`described_model` builds them from, as plain values.
        weights: where public weights came from: a source and SHA-256 by file; None: no weights.
    """

    centre: Tensor | None

    def __init__(
        self,
        features: Features,
        num_outputs: int,
        *,
        constants: Mapping[str, Tensor | nn.Module],
        description: Mapping[str, Any],
        weights: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._shared = _Shared(features)
        self.register_buffer("centre", None)
        self.weights, self._description = weights, dict(description)
        for name, value in constants.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            else:
                self.register_buffer(name, value)
        self.head: nn.Linear | MomentHead = nn.Linear(features.width, num_outputs)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()
        self.train()

    def in_closed_form(self, head: MomentHead) -> FeatureModel:
        """Return the model with a head that is solved from released moments."""
        self.head = head
        return self

    def add_centre(self) -> FeatureModel:
        """Return the model with a centre of its features, zero until it is released."""
        self.centre = torch.zeros(self.extractor.width)
        return self

    def set_centre(self, centre: Tensor) -> None:
        """Take a released centre [D]."""
        assert self.centre is not None
        with torch.no_grad():
            self.centre.copy_(centre)

    def linear_head(self) -> LinearHead:
        """Return the scores of features of norm 1."""
        if isinstance(self.head, MomentHead):
            return self.head.solve()
        weight, bias = self.head.weight.detach(), self.head.bias.detach()
        return LinearHead(HEAD_SCALE * weight, bias)

    @property
    def extractor(self) -> Features:
        """What computes the features, not yet standardised."""
        return self._shared.features

    @property
    def feature_shape(self) -> tuple[int, int, int]:
        """The shape of one record's features, as an image of one pixel: (D, 1, 1)."""
        return self.extractor.width, 1, 1

    def features(self, images: Tensor) -> Tensor:
        """Return features, [N, C, H, W] in [-1, 1] -> [N, D], rows of norm 1."""
        with torch.no_grad():
            rows = standardise_rows(self.extractor.extract(images))
            if self.centre is not None:
                rows = recentre_rows(rows, self.centre.to(rows.device))
        return rows.to(device_of(self.head))

    def forward(self, images: Tensor) -> Tensor:
        """Return [N, outputs], from images or from their features [N, D, 1, 1]."""
        if images.shape[1:] == self.feature_shape:
            return self.head(HEAD_SCALE * images.flatten(1))  # type: ignore[no-any-return]
        return self.head(HEAD_SCALE * self.features(images))  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> FeatureModel:
        """Set the mode of the head; what computes the features stays in eval."""
        super().train(mode)
        for name, module in self.named_children():
            if name != "head":
                module.eval()
        return self

    def description(self) -> dict[str, object]:
        if self.centre is not None:
            return self._description | {"centred": True}
        if not isinstance(self.head, MomentHead):
            return dict(self._description)
        return self._description | {"closed_form": self.head.description()}


class _Shared:
    """An extractor, which keeps no state: a copy of the model uses the same one.

    A session of onnxruntime could not be copied.
    """

    def __init__(self, features: Features) -> None:
        self.features = features

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


def build_feature_model(
    name: str, *, image_shape: tuple[int, int, int], num_outputs: int
) -> FeatureModel:
    """Return the model of a name: ``scattering``, ``onnx:FILE`` or ``features:hf:...``."""
    if name == SCATTERING:
        return _on_scattering(_scattering(image_shape), num_outputs)
    if name.startswith(ONNX):
        path = Path(name.removeprefix(ONNX)).expanduser()
        features = OnnxFeatures(path, image_shape)
        raw = [(path.parent / f).read_bytes() for f in features.description()["files"]]
        contents = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in raw]
        return _on_onnx(features, contents, num_outputs, public_name(name))
    encoder = _Encoder(name.removeprefix(FEATURES), image_shape)
    return _on_encoder(encoder, num_outputs, encoder.model.weights)


def described_model(
    description: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    image_shape: tuple[int, int, int],
    num_outputs: int,
) -> FeatureModel:
    """Build the model of :meth:`FeatureModel.description`; ``weights`` are its saved tensors."""
    model = _described(description, weights, image_shape, num_outputs)
    facts = description.get("closed_form")
    if description.get("centred"):
        model = model.add_centre()
    if facts is None:
        return model
    return model.in_closed_form(MomentHead(model.extractor.width, num_outputs, **facts))


def _described(
    description: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    image_shape: tuple[int, int, int],
    num_outputs: int,
) -> FeatureModel:
    kind = description["kind"]
    if kind == "scattering":
        features = ScatteringFeatures.__new__(ScatteringFeatures)
        features.__dict__ |= vars(_scattering(image_shape))
        # of the run, not of this machine: axes of equal variance are not the same everywhere
        features.axes = Axes(*(weights[name] for name in _AXES))
        return _on_scattering(features, num_outputs)
    if kind == "onnx":
        contents = [weights[_FILE.format(k)] for k in range(len(description["files"]))]
        restored = _from_bytes(description, contents, image_shape)
        return _on_onnx(restored, contents, num_outputs, "")
    if kind != "hf":
        raise ArgumentError(f"features of the kind {kind!r} are unknown to this version")
    net = described_encoder(description["encoder"], image_shape=image_shape, num_outputs=1)
    return _on_encoder(_Encoder.of(net, image_shape), num_outputs, {})


@cache
def _scattering(image_shape: tuple[int, int, int]) -> ScatteringFeatures:
    """Return the features of a shape; their axes take seconds to measure."""
    return ScatteringFeatures(image_shape)


def _on_scattering(features: ScatteringFeatures, num_outputs: int) -> FeatureModel:
    constants = {name: getattr(features.axes, name) for name in _AXES}
    return FeatureModel(
        features, num_outputs, constants=constants, description={"kind": "scattering"}
    )


def _on_onnx(
    features: OnnxFeatures, contents: Sequence[Tensor], num_outputs: int, source: str
) -> FeatureModel:
    files = features.description()["files"]
    description = {
        "kind": "onnx", "files": list(files), "preprocessing": asdict(features.preprocessing)
    }  # fmt: skip
    return FeatureModel(
        features, num_outputs, description=description, weights={"source": source, "files": files},
        constants={_FILE.format(k): content for k, content in enumerate(contents)},
    )  # fmt: skip


def _from_bytes(
    description: Mapping[str, Any], contents: Sequence[Tensor], shape: tuple[int, int, int]
) -> OnnxFeatures:
    """Return the features of an encoder whose files are a model's tensors."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, content in zip(description["files"], contents, strict=True):
            relative = PurePosixPath(name)
            if relative.is_absolute() or ".." in relative.parts or not relative.name:
                raise ArgumentError(f"{name!r} is not the name of a file of an encoder")
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).write_bytes(content.numpy().tobytes())
        p = description["preprocessing"]
        values = {
            "size": {"height": p["height"], "width": p["width"]},
            "image_mean": p["mean"],
            "image_std": p["std"],
            "resample": {"bilinear": 2, "bicubic": 3}[p["resample"]],  # Pillow's numbers
        }
        write_json(folder / "preprocessor_config.json", values)
        return OnnxFeatures(folder / description["files"][0], shape)


class _Encoder(EncoderFeatures):
    """An encoder's features, computed where its weights are."""

    def __init__(self, spec: str, image_shape: tuple[int, int, int]) -> None:
        super().__init__(spec, image_shape)
        self._model.head = nn.Identity()  # type: ignore[assignment]  # the model has its own

    @classmethod
    def of(cls, model: PublicEncoder, image_shape: tuple[int, int, int]) -> _Encoder:
        features = cls.__new__(cls)
        features.image_shape, features._model = image_shape, model
        features.width = model.feature_shape[0]
        model.head = nn.Identity()  # type: ignore[assignment]
        return features

    @property
    def model(self) -> PublicEncoder:
        return self._model

    def extract(self, images: Tensor) -> Tensor:
        return super().extract(images.to(device_of(self._model))).cpu()


def _on_encoder(features: _Encoder, num_outputs: int, weights: dict[str, Any]) -> FeatureModel:
    return FeatureModel(
        features, num_outputs, constants={"encoder": features.model}, weights=weights,
        description={"kind": "hf", "encoder": features.model.description()},
    )  # fmt: skip


def on_features(data: DataSet, model: PublicEncoder | FeatureModel, cache: Path | None) -> DataSet:
    """Return the data set with features [N, D, 1, 1] for images; computed when first read.

    Args:
        data: of images.
        model: computes them.
        cache: the folder that keeps them; None: memory.
    """
    if isinstance(model, FeatureModel):
        return replace(data, images=FixedFeatureImages(data, model, cache))
    return replace(data, images=EncoderImages(data, model, cache))


class FeatureImages(Images):
    """Features of a data set's images, as images of one pixel: float32."""

    decodes = True

    def __init__(
        self, data: DataSet, feature_shape: tuple[int, int, int], cache: Path | None
    ) -> None:
        self._data, self._cache = data, cache
        self.shape = (len(data), *feature_shape)

    def read(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        return np.ascontiguousarray(self._values[indices])

    def describe(self, index: int) -> str:
        return self._data.images.describe(index)

    @cached_property
    def _values(self) -> Any:  # float32 [N, D, 1, 1]
        raise NotImplementedError


class FixedFeatureImages(FeatureImages):
    """Fixed features of norm 1, kept by :func:`dpbam.features.cached_features`."""

    def __init__(self, data: DataSet, model: FeatureModel, cache: Path | None) -> None:
        super().__init__(data, model.feature_shape, cache)
        self._model = model
        self.progress: Callable[[int, int], None] | None = None

    def uncentred(self) -> Any:
        """Return the features before a centre is subtracted: [N, D]."""
        return cached_features(
            self._data, self._model.extractor, self._cache, progress=self.progress
        )

    @cached_property
    def _values(self) -> Any:
        """Return the features that the head sees; read first when the centre is released."""
        rows, centre = self.uncentred(), self._model.centre
        if centre is not None:
            blocks = np.array_split(rows, 1 + len(rows) // _CENTRED)
            moved = [recentre_rows(torch.from_numpy(b.copy()), centre.cpu()) for b in blocks]
            rows = torch.cat(moved).numpy()
        return rows[:, :, None, None]


class EncoderImages(FeatureImages):
    """Features of a frozen encoder, as its own layers scale them."""

    def __init__(self, data: DataSet, model: PublicEncoder, cache: Path | None) -> None:
        super().__init__(data, model.feature_shape, cache)
        self._model = model

    @cached_property
    def _values(self) -> Any:
        if self._cache is None:
            return self._computed(np.empty(self.shape, np.float32))
        path = self._cache / f"features-{self._key()}.npy"
        if not holds_features(path, self.shape):
            with atomic(path) as temporary:
                rows = np.lib.format.open_memmap(temporary, "w+", np.float32, self.shape)
                self._computed(rows).flush()
        return np.load(path, mmap_mode="r", allow_pickle=False)

    def _key(self) -> str:
        """Digest all records, the encoder's weights and the constants of its preprocessing.

        The data set's fingerprint would not do: of images that are decoded it reads some.
        """
        model = self._model
        machine = (torch.__version__, device_of(model).type)
        weights = weights_digest(model.encoder)
        facts = (self._data.images.digest(), weights, model.description(), machine)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def _computed(self, out: Any) -> Any:
        """Write the features of every record into ``out`` [N, D, 1, 1]."""
        device = device_of(self._model)
        # the fast kernels of attention have no batching rule
        with evaluating(self._model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            for start in range(0, len(self), _ROWS):
                indices = np.arange(start, min(start + _ROWS, len(self)))
                images = to_float(self._data.batch(indices)[0].to(device))
                rows = over_rows(lambda x: self._model.features(x[None])[0], images)
                out[indices] = rows.cpu().numpy()[:, :, None, None]
        return out
