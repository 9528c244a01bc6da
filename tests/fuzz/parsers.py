"""The readers of files that others may have made, each with valid files to start from.

What a reader promises: it returns, or it raises an error that the command line shows as one
sentence. Anything else would be a traceback: a bug.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

from dpbam.app.cli.boundary import user_sentence
from dpbam.app.runs import Budget, RunConfig, load_run_model, stored_config
from dpbam.app.runs import checkpoint as checkpoints
from dpbam.app.runs.files import read_json_lines
from dpbam.data import decode
from dpbam.data.built_in import read_batch, read_labels
from dpbam.data.labels_csv import read_rows
from dpbam.data.npz import NpzFile, open_npz
from dpbam.data.sources import Options
from dpbam.data.tables import Tables
from dpbam.privacy.ledger import Ledger
from tests.results import run_facts


@dataclass(frozen=True)
class Parser:
    """A reader, the name its file must have, and valid files."""

    read: Callable[[Path], Any]
    filename: str
    valid: tuple[bytes, ...]

    def try_on(self, content: bytes, folder: Path) -> str:
        """Read ``content``; "read", or the sentence that refused it; a bug is raised."""
        path = folder / self.filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        try:
            self.read(path)
        except Exception as error:
            sentence = user_sentence(error)
            if sentence is None:
                raise
            return sentence
        return "read"


def _read_checkpoint(path: Path) -> Any:
    """With the name that its content asks for, so that the content itself is looked at."""
    content = path.read_bytes()
    path.unlink()
    folder = path.parent / "checkpoints"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    (folder / f"step-00000007.{checkpoints._hash(content)}.safetensors").write_bytes(content)
    return checkpoints.load_latest(folder, "r")


def _read_npz(path: Path) -> Any:
    options = Options(root=path.parent)
    tables = Tables(open_npz(str(path), options), options)
    splits = ["all"] if "all" in tables.names else tables.names
    return [tables.dataset(split).batch(torch.arange(1)) for split in splits]


def _read_table(path: Path) -> Any:
    options = Options()
    rows = list(read_rows(path, options))
    options.findings.stop()
    return rows


def _read_model(path: Path) -> Any:
    weights = path.with_name("model.safetensors")
    if not weights.exists():
        weights.write_bytes(save(_mlp().state_dict()))
    return load_run_model(path.parent)


def _mlp() -> torch.nn.Module:
    from dpbam.nn import build_model

    return build_model("mlp", in_channels=1, image_size=8, num_classes=2, seed=0)


def _facts() -> bytes:
    config = RunConfig(epsilon=3.0, freeze=("conv.*",), model_options={"width": 0.5})
    return json.dumps(run_facts(config).to_json()).encode()


def _ledger() -> bytes:
    entry = {"stream": "a1", "noise_multiplier": 1.5, "sampling_rate": 0.1, "unit": "record"}
    lines = [json.dumps({**entry, "step": k, "release": "d" if k else None}) for k in range(3)]
    return ("\n".join(lines) + "\n").encode()


def _budget() -> bytes:
    entry = {"run": "a", "label": "runs/a", "settled": True, "charges": [[1.5, 0.1, 10]]}
    return json.dumps({"epsilon": 8.0, "delta": 1e-5, "accountant": "pld", "unit": "record",
                       "entries": [entry]}).encode()  # fmt: skip


def _checkpoint() -> bytes:
    rest = {"step": 7, "names": ["model.w", "optimizer.0.exp"], "run": "r",
            "groups": [{"lr": 0.1, "params": [0]}], "scalars": {"optimizer.0.t": 7}}  # fmt: skip
    tensors = {"model.w": torch.ones(3), "optimizer.0.exp": torch.zeros(3)}
    return save(tensors, {"dpbam": json.dumps(rest)})


def _npz() -> bytes:
    file = io.BytesIO()
    images = np.arange(4 * 8 * 8, dtype=np.uint8).reshape(4, 8, 8)
    np.savez(file, images=images, labels=np.array([0, 1, 0, 1]), patient=np.array(list("abca")))
    return file.getvalue()


def _compressed_npz() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in (("x_train", np.zeros((2, 8, 8, 3), np.uint8)), ("y_train", [0, 1])):
            entry = io.BytesIO()
            np.save(entry, array)
            archive.writestr(f"{name}.npy", entry.getvalue())
    return file.getvalue()


def _imagenet32() -> bytes:
    file = io.BytesIO()
    np.savez(file, data=np.zeros((2, 3072), np.uint8), labels=np.array([1, 1000]))
    return file.getvalue()


def _image(kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


_CSV = b"file,label,patient,split\na/1.png,cat,ann,train\nb/2.png,dog,bob,test\n"
_MODEL = {
    "format": 4, "dpbam": "0.1", "model": "mlp", "model_options": {}, "image_shape": [1, 8, 8],
    "task": "single-label", "class_names": ["a", "b"], "input": "", "method": "bam",
}  # fmt: skip
_CONFIG = RunConfig(epsilon=3.0, freeze=("a.*",), model_options={"width": 0.5}, image_size=64)

PARSERS: dict[str, Parser] = {
    "config.toml": Parser(RunConfig.from_file, "run.toml", (_CONFIG.to_toml().encode(),)),
    "config.json": Parser(
        RunConfig.from_file, "run.json", (json.dumps(_CONFIG.to_mapping()).encode(),)
    ),
    "facts": Parser(lambda p: stored_config(p.parents[1]), "non-private/run.json", (_facts(),)),
    "ledger": Parser(lambda p: Ledger(1e-5, path=p).charges(), "ledger.jsonl", (_ledger(),)),
    "budget": Parser(lambda p: Budget(p).entries(), "budget.json", (_budget(),)),
    "metrics": Parser(read_json_lines, "metrics.jsonl", (b'{"step": 3, "accuracy": 0.5}\n' * 3,)),
    "checkpoint": Parser(_read_checkpoint, "checkpoint", (_checkpoint(),)),
    "model.json": Parser(_read_model, "model.json", (json.dumps(_MODEL).encode(),)),
    "cifar binary": Parser(partial(read_batch, label_bytes=1), "a.bin", (bytes(2 * 3073),)),
    "npz": Parser(_read_npz, "set.npz", (_npz(), _compressed_npz())),
    "imagenet32": Parser(
        lambda p: read_labels(NpzFile(p, p.parent)), "val_data.npz", (_imagenet32(),)
    ),
    "labels.csv": Parser(_read_table, "labels.csv", (_CSV,)),
    "image": Parser(
        lambda p: decode.read_images([p], (3, 8, 8)),
        "scan.png",
        (
            *(_image(k) for k in ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM")),
            _image("GIF", "P"),
            _image("PNG", "LA"),
        ),
    ),
}
