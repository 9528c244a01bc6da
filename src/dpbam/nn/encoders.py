"""Public encoders with a new head: Hugging Face image models, from the hub or a folder.

A folder holds ``config.json``, ``preprocessor_config.json`` and weights as safetensors. Pickled
weights are refused, and no code of a repository is run. Needs ``dpbam[transformers]``.

Everything that comes with the weights is public, so nothing is fitted to private data: images are
resized and normalised by the constants of ``preprocessor_config.json``. The encoder stays in eval,
in training too: batch norms have the running statistics that they came with, and nothing is dropped
at random. Which families there are, and which output is the feature of each: ``ENCODERS`` of
:mod:`dpbam.catalogue`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbam import _validate
from dpbam._names import ENCODER, is_path, public_name
from dpbam.catalogue import ENCODERS, Encoder
from dpbam.errors import ArgumentError, ArgumentTypeError

_FILES = ("config.json", "preprocessor_config.json", "*.safetensors", "*.safetensors.index.json")
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


@dataclass(frozen=True)
class Preprocessing:
    """How an encoder wants its images, from its ``preprocessor_config.json``: public constants.

    The whole image is resized to (height, width); there is no crop, whatever the file asks for.
    """

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: str

    def __post_init__(self) -> None:
        _validate.count("the encoder's image height", self.height)
        _validate.count("the encoder's image width", self.width)
        _validate.one_of("resample", self.resample, tuple(_RESAMPLE.values()))
        if len(self.mean) != len(self.std) or not all(0 < s < 1e3 for s in self.std):
            raise ArgumentError(
                f"the encoder's image_mean {list(self.mean)} and image_std {list(self.std)} do not "
                "fit: its preprocessor_config.json needs as many of both, and positive deviations"
            )

    @classmethod
    def read(cls, values: Mapping[str, Any], where: object) -> Preprocessing:
        """Take the constants from the values of a ``preprocessor_config.json``."""
        factor = values.get("rescale_factor", 1 / 255)
        if values.get("do_normalize") is False or abs(factor - 1 / 255) > 1e-6:
            raise ArgumentError(
                f"{where} scales images in a way that dpbam does not support: it must divide by "
                "255 and normalise by image_mean and image_std"
            )
        size = values.get("crop_size") if values.get("do_center_crop") else values.get("size")
        try:
            mean, std = (tuple(map(float, values[f"image_{name}"])) for name in ("mean", "std"))
            resample = _RESAMPLE.get(values.get("resample", 2), "bilinear")
            return cls(*_sides(size), mean, std, resample)
        except (KeyError, TypeError) as error:
            raise ArgumentError(
                f"{where} must have image_mean, image_std and size ({error})"
            ) from None


def _sides(size: Any) -> tuple[Any, Any]:
    """Return (height, width) of a number, or of transformers' dicts."""
    if not isinstance(size, Mapping):
        return size, size
    edge = size.get("shortest_edge")
    return size.get("height", edge), size.get("width", edge)


class PublicEncoder(nn.Module):
    """A public encoder and a new head, for images as :func:`dpbam.data.to_float` makes them.

    Args:
        net: of transformers and of a family of ``ENCODERS``, a classifier without its last layer
            (``num_labels=0``) or an image tower.
        preprocessing: its public constants.
        image_shape: (C, H, W) of the images.
        num_outputs: of the head, a linear layer with new weights.
        weights: where the encoder's weights came from: a source and SHA-256 by file.
    """

    encoder: Any
    resize_rows: Tensor
    resize_columns: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        net: Any,
        preprocessing: Preprocessing,
        image_shape: tuple[int, int, int],
        num_outputs: int,
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.preprocessing, self.weights = preprocessing, dict(weights or {})
        _check_channels(image_shape[0], net.config.num_channels, len(preprocessing.mean))
        self._constants(*image_shape[1:])
        self.encoder = net
        for name, parameter in net.named_parameters():
            if name.endswith("mask_token"):  # of pre-training: no image reaches it
                parameter.requires_grad_(False)
        self.train(False)
        with torch.no_grad():
            width = self.features(torch.zeros(1, *image_shape)).shape[1]
        self.head = nn.Linear(width, num_outputs)
        self.train()

    def _constants(self, height: int, width: int) -> None:
        p = self.preprocessing
        rows = resizing(height, p.height, p.resample)  # [H', H]
        columns = resizing(width, p.width, p.resample)  # [W', W]
        mean, std = (torch.tensor(v)[:, None, None] for v in (p.mean, p.std))
        # (u - mean) / std for u = (x + 1) / 2 in [0, 1]
        values = {"resize_rows": rows, "resize_columns": columns, "scale": 0.5 / std,
                  "shift": (0.5 - mean) / std}  # fmt: skip
        for name, value in values.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def feature_shape(self) -> tuple[int, int, int]:
        """The shape of one record's features, as an image of one pixel: (D, 1, 1)."""
        return self.head.in_features, 1, 1

    def pixels(self, images: Tensor) -> Tensor:
        """Resize and normalise images [N, C, H, W] in [-1, 1] for the encoder."""
        resized = self.resize_rows @ images @ self.resize_columns.T
        return resized * self.scale + self.shift  # grey becomes as many channels as constants

    def features(self, images: Tensor) -> Tensor:
        """Return what the head sees: [N, C, H, W] in [-1, 1] -> [N, D]."""
        output = ENCODERS[self.encoder.config.model_type].output
        features: Tensor = self.encoder(pixel_values=self.pixels(images))[output]
        return features.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        """Return [N, outputs], from images or from their features [N, D, 1, 1]."""
        if images.shape[1:] == self.feature_shape:
            return self.head(images.flatten(1))  # type: ignore[no-any-return]
        return self.head(self.features(images))  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> PublicEncoder:
        """Set the mode of the head; the encoder stays in eval."""
        super().train(mode)
        self.encoder.eval()
        return self

    def add_lora(self, lora_rank: int) -> None:
        """Give every linear layer of the encoder a low-rank update B A, with B = 0 at first.

        A is a constant with orthonormal rows, and is not trained. The product does not say how it
        is split: dividing B and multiplying A by a number changes the clipped gradient of both, but
        no output. With A fixed there is one split, the gradient of B is that of B A in an
        orthonormal basis, and noise is added to half as many numbers
        (``reproduce/defaults_lora.py`` compares).
        """
        from peft import LoraConfig, inject_adapter_in_model

        linear = [n for n, m in self.encoder.named_modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise ArgumentError(
                f"the encoder {self.encoder.config.model_type} has no linear layers that LoRA "
                "could be added to: train head, norms or all"
            )
        _validate.count("lora_rank", lora_rank)
        options = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=linear)
        inject_adapter_in_model(options, self.encoder)
        generator = torch.Generator().manual_seed(0)  # public constants, the same in every process
        for name, parameter in self.encoder.named_parameters():
            if "lora_A" in name:
                rows = torch.empty(parameter.shape, dtype=torch.float64)
                parameter.data.copy_(nn.init.orthogonal_(rows, generator=generator))
                parameter.requires_grad_(False)

    def merge_lora(self) -> None:
        """Add the low-rank updates to the weights, W + 2 B A, and remove them."""
        for path, module in list(self.encoder.named_modules()):
            if hasattr(module, "get_base_layer"):
                module.merge()
                parent, _, name = path.rpartition(".")
                setattr(self.encoder.get_submodule(parent), name, module.get_base_layer())

    def description(self) -> dict[str, dict[str, object]]:
        """Return what :func:`described_encoder` builds the architecture from, as plain values."""
        config = self.encoder.config.to_diff_dict()
        values = {k: v for k, v in config.items() if k not in ("_name_or_path", "dtype")}
        return {"config": values, "preprocessing": asdict(self.preprocessing)}

    def classifier(self, class_names: Sequence[str]) -> Any:
        """Return a copy as transformers' own model for image classification, LoRA merged."""
        family = self.encoder.config.model_type
        if ENCODERS[family].output != "logits":
            raise ArgumentError(
                f"transformers has no classifier on these features of {family}: export ONNX or "
                "safetensors"
            )
        merged = copy.deepcopy(self)
        merged.merge_lora()
        names = {"id2label": dict(enumerate(class_names)),
                 "label2id": {name: k for k, name in enumerate(class_names)}}  # fmt: skip
        net = _architecture({**merged.description()["config"], **names})
        last = [m for m in net.classifier.modules() if isinstance(m, nn.Linear)][-1]
        net.load_state_dict(merged.encoder.state_dict(), strict=False)
        last.load_state_dict(merged.head.state_dict())
        return net.eval()

    def save_classifier(self, folder: Path, class_names: Sequence[str]) -> None:
        """Save :meth:`classifier` as transformers does, with the constants of its images."""
        p = self.preprocessing
        codes = {mode: code for code, mode in _RESAMPLE.items()}
        values = {
            "image_processor_type": "ViTImageProcessor", "do_resize": True, "do_rescale": True,
            "do_normalize": True, "rescale_factor": 1 / 255, "resample": codes[p.resample],
            "size": {"height": p.height, "width": p.width}, "image_mean": p.mean,
            "image_std": p.std,
        }  # fmt: skip
        with _quiet():
            self.classifier(class_names).save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(values, indent=2) + "\n")


def load_classifier(folder: Path) -> Any:
    """Load what :meth:`PublicEncoder.save_classifier` wrote, by transformers alone, in eval."""
    with _quiet():
        net = _transformers().AutoModelForImageClassification.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    return net.eval()


def load_encoder(
    spec: str, *, image_shape: tuple[int, int, int], num_outputs: int
) -> PublicEncoder:
    """Load a public encoder, and give it a new head.

    Args:
        spec: ``hf:NAME`` or ``hf:NAME@REVISION`` of the hub, or ``hf:FOLDER``.
        image_shape: (C, H, W) of the images.
        num_outputs: of the head.

    Raises:
        ValueError: if there is no such encoder, or it cannot be used; one sentence.
    """
    _transformers()  # refuses before anything is fetched
    name = spec.removeprefix(ENCODER)
    folder = _folder(name)
    where = folder if is_path(name) else f"the model {name!r} of the Hugging Face hub"
    config = _read(folder / "config.json", where)
    family = _family(config, where)
    files = _weight_files(folder, where)
    preprocessing = Preprocessing.read(
        _read(folder / "preprocessor_config.json", where), f"preprocessor_config.json of {where}"
    )
    with _quiet():
        try:
            net, report = family.load().from_pretrained(
                folder, num_labels=0, dtype=torch.float32, use_safetensors=True,
                trust_remote_code=False, local_files_only=True, output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # a wrong file can fail in any way, an old version lack a class
            raise ArgumentError(
                f"the encoder in {folder} cannot be loaded: {_line(error)}"
            ) from None
    if report["missing_keys"]:
        raise ArgumentError(
            f"the weights in {folder} lack {min(report['missing_keys'])}: they are not those of "
            "its config.json"
        )
    weights = {"source": public_name(spec), "files": {f.name: file_digest(f) for f in files}}
    return PublicEncoder(net, preprocessing, image_shape, num_outputs, weights)


def described_encoder(
    description: Mapping[str, Any],
    *,
    image_shape: tuple[int, int, int],
    num_outputs: int,
) -> PublicEncoder:
    """Build the architecture of :meth:`PublicEncoder.description`, with weights still to load."""
    constants = dict(description["preprocessing"])
    constants |= {name: tuple(constants[name]) for name in ("mean", "std")}
    net = _architecture(description["config"])
    return PublicEncoder(net, Preprocessing(**constants), image_shape, num_outputs)


def _architecture(config: Mapping[str, Any]) -> Any:
    """Return transformers' model of a configuration, with new weights."""
    transformers = _transformers()
    family = _family(config, "the model's description")
    values = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    with _quiet():
        settings = transformers.AutoConfig.for_model(family.name, **values)
        if "id2label" not in values:
            settings.num_labels = 0
        tower = family.output != "logits"
        auto = transformers.AutoModel if tower else transformers.AutoModelForImageClassification
        return auto.from_config(settings, trust_remote_code=False)


def _family(config: Mapping[str, Any], where: object) -> Encoder:
    """Return the family of a configuration; refuse others, and code of a repository's own."""
    if "auto_map" in config or "custom_pipelines" in config:
        raise ArgumentError(
            f"{where} comes with code of its own (auto_map), which is not run: choose a model that "
            "transformers itself knows"
        )
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ENCODERS:
        raise ArgumentError(
            f"{where} is of the architecture {family!r}, which is not supported: choose an encoder "
            f"of {', '.join(ENCODERS)}"
        )
    return ENCODERS[family]


def _folder(name: str) -> Path:
    """Return the folder of an encoder; one of the hub is downloaded, without code or pickles."""
    if not name:
        raise ArgumentError("hf: names no encoder: write hf:NAME of the hub, or hf:FOLDER")
    if not is_path(name):
        return _download(name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ArgumentError(f"there is no folder {name!r} with an encoder")
    return folder


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    repository, _, revision = name.partition("@")
    try:
        with _bars_in_a_terminal():
            return Path(
                snapshot_download(
                    repository, revision=revision or None, allow_patterns=list(_FILES)
                )
            )
    except RepositoryNotFoundError:
        raise ArgumentError(
            f"the Hugging Face hub has no public model {repository!r}: check its name, or give a "
            "folder, such as hf:./encoder"
        ) from None
    except RevisionNotFoundError:
        raise ArgumentError(
            f"the model {repository!r} of the Hugging Face hub has no revision {revision!r}: check "
            "it, or leave it out"
        ) from None
    except Exception as error:  # no such name, no network, no access: many classes
        raise ArgumentError(
            f"the encoder {name!r} cannot be fetched from the Hugging Face hub ({_line(error)}): "
            "check its name and the network, or give a folder"
        ) from None


def _read(path: Path, where: object) -> Mapping[str, Any]:
    if not path.is_file():
        raise ArgumentError(
            f"{where} has no {path.name}: give a folder that save_pretrained of the model "
            "and of its image processor wrote"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ArgumentError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ArgumentTypeError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def _weight_files(folder: Path, where: object) -> list[Path]:
    """Return the safetensors files; refuse a folder that has pickles instead."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(p.name for suffix in ("bin", "pt", "pth") for p in folder.glob(f"*.{suffix}"))
    if pickles:
        raise ArgumentError(
            f"{folder} has its weights as a pickle, {pickles[0]}, which can run code when it is "
            "read: save them as safetensors (model.save_pretrained writes them)"
        )
    if where is folder:
        raise ArgumentError(f"{folder} has no weights: there is no .safetensors file")
    raise ArgumentError(
        f"{where} has no weights as safetensors, and pickles, which can run code when they are "
        "read, are not fetched: choose another model, or convert it and give its folder"
    )


def _check_channels(images: int, model: int, constants: int) -> None:
    if constants != model:
        raise ArgumentError(
            f"the encoder takes {model} channels but its preprocessor_config.json has "
            f"{constants} means: they are not of one model"
        )
    if images not in (1, model):
        raise ArgumentError(
            f"the encoder takes images of {model} channels, and the data has {images}: convert "
            "them with --channels"
        )


def resizing(old: int, new: int, mode: str) -> Tensor:
    """Return A [new, old], so that A x is x resized along an axis, antialiased."""
    identity = torch.eye(old)[None, None]
    if old == new:
        return identity[0, 0]
    return F.interpolate(identity, size=(new, old), mode=mode, antialias=True)[0, 0]


def file_digest(path: Path) -> str:
    """Return SHA-256 of a file: what the hub shows next to it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".:")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ArgumentError(
            "public encoders need the package transformers: pip install 'dpbam[transformers]'"
        ) from None
    return transformers


@contextmanager
def _bars_in_a_terminal() -> Iterator[None]:
    """Show the hub's progress bars in a terminal alone."""
    from huggingface_hub import utils as hub

    hide = not sys.stderr.isatty() and not hub.are_progress_bars_disabled()
    if hide:
        hub.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            hub.enable_progress_bars()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' remarks on a head that is not there, and its progress bars."""
    from transformers.utils import logging as chatter

    before, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        yield
    finally:
        chatter.set_verbosity(before)
        if bars:
            chatter.enable_progress_bar()
