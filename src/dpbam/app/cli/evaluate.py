"""``dpbam evaluate`` and ``dpbam predict``: a run's model on labelled data, and on images."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dpbam import _validate
from dpbam.app.cli.output import Json, facts, note, option, percent, print_json, say, table, to_json
from dpbam.app.runs import RunModel, load_run_model, stored_config
from dpbam.app.runs.files import write_atomic, write_json
from dpbam.app.runs.metrics import Metrics, Proportion, Scores
from dpbam.app.runs.own_code import check_code
from dpbam.app.runs.predict import Prediction, evaluate_dataset, predict_files
from dpbam.data import DataSet, load

CAVEAT = (
    "These figures come from the records themselves, without noise: on private held-out records "
    "they are a release of their own, which the run's epsilon does not cover."
)
FORMATS = ("csv", "json")
_MOST_COLUMNS = 12  # of a confusion matrix that fits on a screen

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Device = Annotated[str, option("cpu, cuda, ...")]
OwnModel = Annotated[
    str | None, option("The run's own module:function, which you trust to be run.")
]


def evaluate(
    run: Run,
    data: Annotated[
        str | None, option("A data set, as for train. By default the run's own.")
    ] = None,
    split: Annotated[str, option("test, val, train or all.")] = "test",
    by: Annotated[list[str] | None, option("A column of sub-groups, repeatable.")] = None,
    unit: Annotated[
        str | None, option("Column of the unit of privacy, if a part is held out.")
    ] = None,
    data_root: Annotated[Path | None, option("Where downloads live.")] = None,
    device: Device = "cpu",
    model: OwnModel = None,
    json: Json = False,
    save: Annotated[
        bool, option("Keep the JSON in the run's non-private folder.", "--save")
    ] = False,
) -> None:
    """Evaluate a run's model on labelled data, as a whole, by class and by sub-group.

    Accuracy with a 95% Wilson interval, balanced accuracy, AUC, calibration error, the confusion
    matrix, and the worst sub-group.

    Examples:
        $ dpbam evaluate runs/digits --data digits
        $ dpbam evaluate runs/scans --data ./scans --by sex --by folder1 --save
        $ dpbam evaluate runs/scans --data other-hospital.npz --json
    """
    loaded = load_run_model(run, device=device, own_model=model)
    dataset = _load(run, loaded, data, split, unit, data_root)
    result = evaluate_dataset(loaded, dataset, by or ())
    report = {"data": dataset.name, "split": split, **result.to_dict(), "note": CAVEAT}
    if json:
        print_json(report)
    else:
        _show(dataset, result)
    if save:
        path = run / "non-private" / f"evaluation-{split}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, report)
        note(f"saved as {path}")


def predict(
    run: Run,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Image files, or .npz arrays.")
    ],
    format: Annotated[str, option("csv or json.")] = "csv",
    out: Annotated[Path | None, option("A file to write; otherwise stdout.")] = None,
    device: Device = "cpu",
    model: OwnModel = None,
) -> None:
    """Predict images with a run's model: a label and the probability of every class.

    Image files are resized to what the model takes. Nothing is written if one cannot be read.

    Examples:
        $ dpbam predict runs/scans one.png two.png
        $ dpbam predict runs/scans new/*.png --out predictions.csv
        $ dpbam predict runs/digits batch.npz --format json
    """
    _validate.one_of("--format", format, FORMATS)
    loaded = load_run_model(run, device=device, own_model=model)
    predictions = list(predict_files(loaded, files))
    text = _csv(predictions, loaded.class_names) if format == "csv" else _json(predictions)
    if out is None:
        print(text, end="")
    else:
        write_atomic(out, text)


COMMANDS = {"evaluate": evaluate, "predict": predict}


def _load(
    run: Path, model: RunModel, data: str | None, split: str, unit: str | None, root: Path | None
) -> DataSet:
    """Load the data, resized to what the model takes; the run's own is held out as the run did."""
    config = stored_config(run) if data is None or (run / "non-private").is_dir() else None
    if config is not None and data is None:
        check_code({"data": config.data}, (), run)
    if config is not None and (data is None or _same(data, config.data)):
        data, unit, root = config.data, unit or config.unit, root or config.data_root
    channels, height, width = model.image_shape
    return load(
        str(data), split=split, root=root, image_size=(height, width), channels=channels, unit=unit
    )


def _same(one: str, other: str) -> bool:
    """Whether two specs name the same data, also by different paths."""
    return one == other or Path(one).resolve() == Path(other).resolve()


def _show(dataset: DataSet, result: Metrics) -> None:
    scores = result.scores
    values = {
        "data": f"{dataset.name}, {len(dataset)} records",
        "accuracy": f"{_share(scores.accuracy)} (95% Wilson)",
        "balanced accuracy": percent(scores.balanced_accuracy),
        "AUC": _figure(scores.auc),
        "calibration error": percent(scores.calibration_error),
    }
    say(facts(values))
    rows = [(name, share.count, _share(share)) for name, share in result.classes.items()]
    say(table(("class", "records", "recognised"), rows))
    for column in result.groups:
        _show_groups(column, result)
    if len(result.classes) <= _MOST_COLUMNS:
        counts = zip(result.classes, result.confusion.tolist(), strict=True)
        header = ("label \\ predicted", *result.classes)
        say(table(header, [(name, *row) for name, row in counts]))
    say(CAVEAT)


def _show_groups(column: str, result: Metrics) -> None:
    worst = result.worst(column)
    rows = [_group(name, s, name == worst) for name, s in result.groups[column].items()]
    header = (column, "records", "accuracy", "balanced", "AUC", "calibration error")
    say(table(header, rows, title=f"by {column}; the worst is {worst}"))


def _group(name: str, scores: Scores, worst: bool) -> tuple[object, ...]:
    return (
        f"{name or '(none)'}{' <- worst' if worst else ''}",
        scores.accuracy.count,
        _share(scores.accuracy),
        percent(scores.balanced_accuracy),
        _figure(scores.auc),
        percent(scores.calibration_error),
    )


def _share(share: Proportion) -> str:
    if not share.count:
        return "-"
    low, high = share.interval
    return f"{percent(share.value)} [{percent(low)}, {percent(high)}]"


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


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
