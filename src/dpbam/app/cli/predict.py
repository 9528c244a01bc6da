"""``dpbam predict``: labels and probabilities of images."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpbam.app.cli.output import examples, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpbam.app.runs.predict import Prediction

EXAMPLES = examples(
    "dpbam predict runs/scans one.png two.png",
    "dpbam predict runs/scans new/*.png --out predictions.csv",
    "dpbam predict runs/digits batch.npz --format json",
)
FORMATS = ("csv", "json")


def run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Image files, or .npz arrays.")
    ],
    format: Annotated[str, typer.Option(help="csv or json.")] = "csv",
    out: Annotated[Path | None, typer.Option(help="A file to write; otherwise stdout.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    model: Annotated[
        str | None, typer.Option(help="The run's own module:function, which you trust to be run.")
    ] = None,
) -> None:
    """Predict images with a run's model: a label and the probability of every class.

    Image files are resized to what the model takes. Nothing is written if one cannot be read.
    """
    from dpbam import _validate
    from dpbam.app.runs import load_run_model
    from dpbam.app.runs.predict import predict_files

    _validate.one_of("--format", format, FORMATS)
    loaded = load_run_model(run, device=device, own_model=model)
    predictions = list(predict_files(loaded, files))
    text = _csv(predictions, loaded.class_names) if format == "csv" else _json(predictions)
    if out is None:
        print(text, end="")
        return
    from dpbam.app.runs.files import write_atomic

    write_atomic(out, text)


def _csv(predictions: Sequence[Prediction], class_names: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "label", *(f"p({name})" for name in class_names)])
    for one in predictions:
        probabilities = (f"{one.probabilities[name]:.6f}" for name in class_names)
        writer.writerow([one.file, one.label, *probabilities])
    return text.getvalue()


def _json(predictions: Sequence[Prediction]) -> str:
    return to_json([vars(one) for one in predictions], indent=2) + "\n"
