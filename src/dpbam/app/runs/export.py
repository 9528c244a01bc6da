"""A run's model for use elsewhere: ONNX, Hugging Face, or plain safetensors; checked by predicting.

==============  ==================================================================================
format          what is written
==============  ==================================================================================
onnx            ``model.onnx``: from uint8 images [N, C, H, W] to the model's outputs before
                softmax or sigmoid; ``model.json`` has the names of the outputs
hf              a public encoder as transformers' own model for image classification, with its
                image processor; any other model as files for the hub, which dpbam loads
safetensors     ``model.safetensors`` and ``model.json``, low-rank updates merged into the weights
==============  ==================================================================================

Each folder also has the model card, the privacy statement, and in ``exported.json`` the SHA-256 of
the model that the statement is about and of all files of the export: ``dpbam sign`` signs it, and
``dpbam audit`` compares the files with it. Only what the statement lets
be published is exported. What was written is loaded again, and
must predict what the run's model does: outputs differ by at most 1e-5 of the largest one.
"""

from __future__ import annotations

import copy
import logging
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbam import _validate
from dpbam.app.runs.card import exported_card
from dpbam.app.runs.documents import Exported, Statement
from dpbam.app.runs.files import write_atomic
from dpbam.app.runs.folder import MARK, RunFolder
from dpbam.app.runs.identity import EXPORTED, file_digest
from dpbam.app.runs.model_file import RunModel, load_run_model
from dpbam.app.runs.run import RunError
from dpbam.app.runs.statement_check import check_statement

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMATS = ("onnx", "hf", "safetensors")
TOLERANCE = 1e-5
_ROWS = 5  # of the images that are predicted to check: not the number that is traced


def export(
    run: str | Path, to: str, out: str | Path | None = None, *, own_model: str | None = None
) -> tuple[Path, float]:
    """Write a finished run's model in another format, and check that it predicts the same.

    Args:
        run: the run folder.
        to: "onnx", "hf" or "safetensors".
        out: a folder, new or empty; None: next to the run folder, with the format in its name.
        own_model: as for :func:`load_run_model`.

    Returns:
        The folder, and the largest difference between the outputs, relative to the largest output.

    Raises:
        RunError: if the run's statement does not let this model be published, or disagrees with
            the run's other files, the folder is not empty, or the written model predicts something
            else.
    """
    _validate.one_of("--to", to, FORMATS)
    source = RunFolder(run)
    model = load_run_model(run, own_model=own_model)
    _check_publishable(source)
    folder = Path(out) if out is not None else source.path.with_name(f"{source.path.name}-{to}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is not an empty folder: choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        writers = {"onnx": _to_onnx, "hf": _to_hf, "safetensors": _to_safetensors}
        outputs = writers[to](model, source, folder, own_model)
        difference = _difference(model, outputs)
    except BaseException:
        shutil.rmtree(folder)  # nothing that was not checked
        raise
    # by name: a copy that an editor left, or a link, is not the statement
    statement = (source.statement_json, source.statement, source.statement_html, source.signature)
    for path in statement:
        if path.is_file() and not path.is_symlink():
            shutil.copyfile(path, folder / path.name)
    if source.card.exists():
        native = (folder / "config.json").exists()  # transformers' own
        library = "onnx" if to == "onnx" else "transformers" if native else "dpbam"
        card = source.card.read_text(encoding="utf-8")
        write_atomic(folder / source.card.name, exported_card(card, library))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    Exported(
        format=1,
        exported_from={source.weights.name: file_digest(source.weights)},
        files={path.relative_to(folder).as_posix(): file_digest(path) for path in files},
    ).write(folder / EXPORTED)
    return folder, difference


def _check_publishable(source: RunFolder) -> None:
    """Refuse a model that the statement next to it does not let be published, or is not about."""
    if not source.statement_json.is_file():
        raise RunError(
            f"{source.path} has no privacy statement: finish its training first (dpbam train "
            "--resume)"
        )
    statement = Statement.read(source.statement_json)
    if not statement.private:
        raise RunError(
            f"{source.path} is a reference without privacy, so its model is not exported: use "
            f"{source.weights.name} where it is, by dpbam predict or load_run_model"
        )
    if source.weights.name not in statement.may_be_published or (source.path / MARK).exists():
        raise RunError(
            f"the privacy statement of {source.path} does not let its model be published, as that "
            "of a search's trial: export the search's folder best"
        )
    digests = statement.identity.files
    required = {source.weights.name, source.model.name}
    for name in sorted(required | {n for n in digests if (source.path / Path(n).name).exists()}):
        if digests.get(name) != file_digest(source.path / Path(name).name):
            raise RunError(
                f"{name} in {source.path} is not the file that the privacy statement is about: "
                "restore it, or resume the run to write both again"
            )
    check_statement(source, statement)


def _images(model: RunModel) -> Tensor:
    """Return images to compare predictions on: random, so they reveal nothing."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (_ROWS, *model.image_shape)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _difference(model: RunModel, outputs: Tensor) -> float:
    """Return max |y - y'| / max(1, max |y|); refuse more than the tolerance."""
    import torch

    from dpbam.data import to_float

    with torch.no_grad():
        expected = model.module(to_float(_images(model)))
    apart = float((expected - outputs).abs().max() / expected.abs().max().clamp(min=1))
    if not apart <= TOLERANCE:
        raise RunError(
            f"the exported model's outputs differ by {apart:.1e} of the largest, more than "
            f"{TOLERANCE:g}: nothing was written, please report this model"
        )
    return apart


def _merged(module: nn.Module) -> nn.Module:
    """Return a copy without low-rank updates: they are added to the weights."""
    from dpbam.nn.encoders import PublicEncoder

    module = copy.deepcopy(module)
    if isinstance(module, PublicEncoder):
        module.merge_lora()
    return module


def _to_safetensors(
    model: RunModel, source: RunFolder, folder: Path, own_model: str | None
) -> Tensor:
    import torch
    from safetensors.torch import save

    from dpbam.data import to_float

    target, merged = RunFolder(folder), _merged(model.module)
    weights = {name: value.contiguous() for name, value in merged.state_dict().items()}
    write_atomic(target.weights, save(weights))
    options = {k: v for k, v in model.facts.model_options.items() if k != "lora_rank"}
    model.facts.model_copy(update={"model_options": options}).write(target.model)
    with torch.no_grad():
        loaded = load_run_model(folder, own_model=own_model).module
        return loaded(to_float(_images(model)))  # type: ignore[no-any-return]


def _to_hf(model: RunModel, source: RunFolder, folder: Path, own_model: str | None) -> Tensor:
    import torch

    from dpbam.data import to_float
    from dpbam.nn.encoders import PublicEncoder, load_classifier

    module = model.module
    if not isinstance(module, PublicEncoder):
        return _to_safetensors(model, source, folder, own_model)
    module.save_classifier(folder, model.class_names)
    with torch.no_grad():
        pixels = module.pixels(to_float(_images(model)))
        return load_classifier(folder)(pixel_values=pixels).logits  # type: ignore[no-any-return]


def _to_onnx(model: RunModel, source: RunFolder, folder: Path, own_model: str | None) -> Tensor:
    import torch

    path = folder / "model.onnx"
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        raise RunError(
            "exporting to ONNX needs the packages onnx, onnxruntime and onnxscript: "
            "pip install 'dpbam[onnx]'"
        ) from None
    images, module = _images(model), _without_complex(model)
    try:
        _write_onnx(_from_bytes(module), images[:2], path)
    except Exception as error:  # torch's exporter fails in many ways
        said = str(error).strip().splitlines()[0]
        raise RunError(
            f"this model cannot be exported to ONNX ({said}): use --to safetensors"
        ) from error
    model.facts.write(folder / "model.json")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _without_complex(model: RunModel) -> nn.Module:
    """Return the module to export: low-rank updates merged, scattering in real arithmetic."""
    from dpbam.app.runs.feature_model import FeatureModel
    from dpbam.app.runs.scattering_onnx import RealScattering
    from dpbam.features import ScatteringFeatures

    module = model.module
    if not isinstance(module, FeatureModel):
        return _merged(module)
    if isinstance(module.extractor, ScatteringFeatures):
        return RealScattering(module.extractor, module.linear_head(), module.centre)
    raise RunError(
        f"{model.facts.model} cannot be exported to ONNX, since torch does not compute its "
        "features: use --to safetensors, which holds features and head"
    )


def _write_onnx(module: nn.Module, images: Tensor, path: Path) -> None:
    import torch

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # about the exporter's own future
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # torchvision is not installed
        torch.onnx.export(
            module.eval(), (images,), path, dynamo=True, external_data=False, verbose=False,
            input_names=["images"], output_names=["outputs"],
            dynamic_shapes={"images": {0: torch.export.Dim("rows", min=1)}},
        )  # fmt: skip
    _remove_traces(path)


def _remove_traces(path: Path) -> None:
    """Remove what torch notes of each operation: paths of the operator's, lines of their code."""
    import onnx

    graph = onnx.load(path)
    _clear_notes(graph)
    onnx.save(graph, path)


def _clear_notes(message: Any) -> None:
    """Clear the free text of a protocol buffer and of those inside it."""
    for name in {"metadata_props", "doc_string"} & set(message.DESCRIPTOR.fields_by_name):
        message.ClearField(name)
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "DESCRIPTOR") else value:
                _clear_notes(inner)


def _from_bytes(module: nn.Module) -> nn.Module:
    """Return the model with :func:`dpbam.data.to_float` before it."""
    from torch import nn as layers

    class FromBytes(layers.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, images: Any) -> Any:
            return self.module(images.float() * (1 / 127.5) - 1.0)

    return FromBytes()
