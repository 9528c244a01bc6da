"""``dpbam evaluate`` and ``dpbam predict``: a run's model on labelled data, and on images."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from dpbam import _validate
from dpbam.app.cli.output import (
    Json,
    facts,
    note,
    option,
    percent,
    print_json,
    say,
    table,
    to_json,
)
from dpbam.app.cli.progress import counting
from dpbam.app.runs import RunModel, load_run_model, stored_config
from dpbam.app.runs.escaping import cell
from dpbam.app.runs.files import read_json, write_atomic, write_json
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.metrics import Metrics, Proportion, Scores
from dpbam.app.runs.own_code import check_code
from dpbam.app.runs.predict import (
    Prediction,
    evaluate_dataset,
    files_in,
    predict_files,
    summaries,
)
from dpbam.app.runs.task_metrics import TaskMetrics, best_thresholds, parse_thresholds
from dpbam.data import DataError, DataSet, load
from dpbam.data.split import is_held_out
from dpbam.errors import ArgumentError
from dpbam.training.events import metric_label, metric_text

CAVEAT = (
    "These figures come from the records themselves, without noise: on records that are not public "
    "they are a release of their own, which the run's epsilon does not cover."
)
FORMATS = ("csv", "json")
_MOST_COLUMNS = 12  # of a confusion matrix that fits on a screen

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Device = Annotated[str, option("cpu, cuda, ...")]
Threshold = Annotated[list[str] | None, option("Of findings: 0.3, or NAME=0.3; repeatable. [0.5]")]
ThresholdFrom = Annotated[
    str | None, option("A data set that you declare public: thresholds of the best F1 on it.")
]
_KINDS = {"regression": "values", "segmentation": "shares", "single-label": "probabilities",
          "multi-label": "probabilities"}  # fmt: skip
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
    threshold: Threshold = None,
    threshold_from: ThresholdFrom = None,
    label_column: Annotated[
        list[str] | None, option("Of labels.csv, as for train. By default the run's own.")
    ] = None,
    unit: Annotated[
        str | None, option("Unit by which a part is held out. By default the run's own.")
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

    Single-label: accuracy with a 95% Wilson interval, balanced accuracy, AUC, calibration error,
    the confusion matrix, and the worst sub-group. Multi-label: AUC and average precision of every
    finding. Regression: R2, MAE, Spearman. Segmentation: Dice and IoU of every class.

    Examples:
        $ dpbam evaluate runs/digits --data digits
        $ dpbam evaluate runs/scans --data ./scans --by sex --by folder1 --save
        $ dpbam evaluate runs/scans --data other-hospital.npz --split all --json
    """
    loaded = load_run_model(run, device=device, own_model=model)
    dataset = _load(run, loaded, data, split, unit, data_root, label_column)
    own = split == "test" and _is_test_set(run, dataset)
    if split == "test" and not own and is_held_out(dataset):
        _refuse_other_split(run, dataset, unit)
    at = _thresholds(run, loaded, threshold, threshold_from, data_root, label_column)
    result = evaluate_dataset(loaded, dataset, by or (), at)
    report = {
        "data": dataset.name, "split": split, "test_set_of_the_run": own, **result.to_dict(),
        "note": CAVEAT,
    }  # fmt: skip
    if json:
        print_json(report)
    elif isinstance(result, TaskMetrics):
        _show_task(dataset, result)
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
        list[Path],
        typer.Argument(metavar="FILES...", help="Image files, folders of them, or .npz arrays."),
    ],
    format: Annotated[str, option("csv or json.")] = "csv",
    out: Annotated[Path | None, option("A file to write; otherwise stdout.")] = None,
    masks: Annotated[
        Path | None, option("A folder for the masks of a segmentation, as PNG files.")
    ] = None,
    threshold: Threshold = None,
    threshold_from: ThresholdFrom = None,
    device: Device = "cpu",
    model: OwnModel = None,
) -> None:
    """Predict images with a run's model: a label and the probability of every class.

    Findings are listed with | between them; a regression gives the value; a segmentation the share
    of the pixels of each class and, with --masks, a mask per image.

    Image files are resized to what the model takes; a folder stands for all image files in it.
    A file that cannot be read is reported and left out; exit code 1.

    Examples:
        $ dpbam predict runs/scans one.png two.png
        $ dpbam predict runs/scans new/ --out predictions.csv
        $ dpbam predict runs/digits batch.npz --format json
    """
    _validate.one_of("--format", format, FORMATS)
    loaded = load_run_model(run, device=device, own_model=model)
    if masks is not None and loaded.task.name != "segmentation":
        raise ArgumentError(f"--masks is for a segmentation, not for {loaded.task.name}")
    at = _thresholds(run, loaded, threshold, threshold_from, None, None)
    paths = files_in(files)
    predictions: list[Prediction] = []
    unreadable: list[DataError] = []
    with counting("images", len(paths)) as update:
        for one in predict_files(loaded, paths, at, unreadable.append):
            predictions.append(one)
            update(len(predictions), max(len(paths), len(predictions)))
    if not predictions and len(unreadable) == 1:
        raise unreadable[0]
    for error in unreadable:
        note(f"warning: {' '.join(str(error).split())}")
    if not predictions:
        raise DataError(f"none of the {len(paths)} files could be read: nothing was written")
    if masks is not None:
        _write_masks(predictions, masks)
        note(f"{len(predictions)} masks in {masks}, pixels of class numbers from 0")
    kind = _KINDS[loaded.task.name]
    text = _csv(predictions, loaded, kind) if format == "csv" else _json(predictions, kind)
    if out is None:
        print(text, end="")
    else:
        write_atomic(out, text)
        note(f"{len(predictions)} images predicted, written to {out}")
    if unreadable:
        note(f"{len(unreadable)} of {len(paths)} files could not be read, and are left out")
        raise typer.Exit(1)


COMMANDS = {"evaluate": evaluate, "predict": predict}


def _thresholds(
    run: Path, model: RunModel, given: list[str] | None, public: str | None, root: Path | None,
    columns: list[str] | None,
) -> dict[str, float]:  # fmt: skip
    """Return the thresholds of findings that were given, or that are best on a public set."""
    if not given and public is None:
        return {}
    if model.task.name != "multi-label":
        raise ArgumentError(
            f"thresholds are for findings, and this model does {model.task.name}: leave them out"
        )
    found: dict[str, float] = {}
    if public is not None:
        dataset = _load(run, model, public, "train", None, root, columns)
        found = best_thresholds(model.task, *summaries(model, dataset))
        note(f"thresholds from {dataset.name}, which you declare public: "
             + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))  # fmt: skip
    return {**found, **parse_thresholds(given or (), model.class_names)}


def _load(
    run: Path, model: RunModel, data: str | None, split: str, unit: str | None, root: Path | None,
    columns: list[str] | None,
) -> DataSet:  # fmt: skip
    """Load the data, resized to what the model takes.

    Where a part is held out, it is by the run's unit, unless another is given or the data has no
    such column. The result may still be another part than the run's: see :func:`_is_test_set`.
    """
    config = stored_config(run) if data is None or RunFolder(run).started else None
    if config is not None and data is None:
        check_code({"data": config.data}, (), run)
    if config is not None and data in (None, config.data):
        data, root = config.data, root or config.data_root
    if config is not None and not columns:
        columns = list(config.label_columns)
    channels, height, width = model.image_shape
    # images are converted to grey or RGB alone; other channels, as of arrays, must be the model's
    convertible = channels if channels in (1, 3) else None
    part = partial(
        load, str(data), split=split, root=root, image_size=(height, width), channels=convertible,
        task=model.task.name, label_columns=columns or (), dicom_window=model.dicom_window,
    )  # fmt: skip
    if unit is None and config is not None and config.unit is not None:
        with suppress(DataError):  # if it is not for want of the column, it is raised again
            return part(unit=config.unit)
    return part(unit=unit)


def _is_test_set(run: Path, dataset: DataSet) -> bool:
    """Whether these are the test records of the run, by content: a path may lead elsewhere.

    Columns, such as those of sub-groups, may have changed since. A folder without the run's facts
    has only its statement: the name and size of the test set, not how it was held out.
    """
    folder = RunFolder(run)
    if folder.started:
        known = folder.read_facts().get("non_private_test_records")
        return known == replace(dataset, columns={}).fingerprint()
    stated = _statement(folder).get("evaluated_on")
    if is_held_out(dataset) or not isinstance(stated, dict):
        return False
    return (stated.get("set"), stated.get("records")) == (dataset.name, len(dataset))


def _refuse_other_split(run: Path, dataset: DataSet, unit: str | None) -> None:
    """Refuse a held-out part that may not be the run's: it may hold records of the training."""
    folder = RunFolder(run)
    if folder.started:
        raise ArgumentError(
            f"{dataset.name} is not what the run held out, so the model may have been trained on "
            "its records: restore the run's data and leave --unit out, or pass --split all for "
            "data that the run never saw"
        )
    stated = _statement(folder).get("unit_name")
    if unit is None or stated not in (None, unit):
        named = "the --unit of its training" if stated is None else f"--unit {stated}"
        raise ArgumentError(
            f"{run} has no record of what the run held out, so the model may have been trained on "
            f"records of {dataset.name}: pass {named}, or --split all for data that the run never "
            "saw"
        )


def _statement(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.statement_json) if folder.statement_json.exists() else {}


def _show(dataset: DataSet, result: Metrics) -> None:
    scores = result.scores
    frequent = max(share.count for share in result.classes.values()) / max(1, len(dataset))
    values = {
        "data": f"{dataset.name}, {len(dataset)} records",
        "accuracy": f"{_share(scores.accuracy)} (95% Wilson)",
        "balanced accuracy": percent(scores.balanced_accuracy),
        "AUC": _figure(scores.auc),
        "calibration error": percent(scores.calibration_error),
        "best constant": f"accuracy {percent(frequent)}",
    }
    say(facts(values))
    rows = [(name, share.count, _share(share)) for name, share in result.classes.items()]
    say(table(("class", "records", "recognised"), rows))
    for column in result.groups:
        _show_groups(column, result)
    if len(result.classes) <= _MOST_COLUMNS:
        counts = zip(result.classes, result.confusion.tolist(), strict=True)
        names = ("label \\ predicted", *result.classes)
        say(table(names, [(name, *row) for name, row in counts]))
    say(CAVEAT)


def _show_task(dataset: DataSet, result: TaskMetrics) -> None:
    low, high = (metric_text(result.metric, edge) for edge in result.interval)
    values = {metric_label(name): metric_text(name, value) for name, value in result.scores.items()}
    main = metric_label(result.metric)
    values[main] += f" [{low}, {high}] (95% bootstrap)"
    values["best constant"] = f"{main} {metric_text(result.metric, result.trivial)}"
    if result.task == "multi-label":
        values["threshold"] = _listed_thresholds(result)
    say(facts({"data": f"{dataset.name}, {len(dataset)} records", **values}))
    if result.classes:
        some = next(iter(result.classes.values()))
        names = [name for name in some if name not in ("value", "count", "threshold")]
        what = "pixels" if result.task == "segmentation" else "records"
        header = ("class", what, main, *map(_narrow, names))
        rows = [
            (label, found["count"], *(_figure(found[name]) for name in ("value", *names)))
            for label, found in result.classes.items()
        ]
        say(table(header, rows))
    for column, groups in result.groups.items():
        worst, names = result.worst(column), list(result.scores)
        rows = [
            (f"{group or '(none)'}{' <- worst' if group == worst else ''}", found["count"],
             *(_figure(found[name]) for name in names))
            for group, found in groups.items()
        ]  # fmt: skip
        header = (column, "records", *map(_narrow, names))
        say(table(header, rows, title=f"by {column}; the worst is {worst}"))
    say(CAVEAT)


def _listed_thresholds(result: TaskMetrics) -> str:
    """Return the threshold of all findings, or each one's: a column would make the table wide."""
    at = {name: _figure(found["threshold"]) for name, found in result.classes.items()}
    same = set(at.values())
    return same.pop() if len(same) == 1 else ", ".join(f"{k} {v}" for k, v in at.items())


def _narrow(metric: str) -> str:
    """Return a metric's name for a column: one word per line, none of which is broken."""
    return metric_label(metric).replace(" ", "\n")


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


def _csv(predictions: Sequence[Prediction], model: RunModel, kind: str) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    shown = {"probabilities": "p({})", "shares": "share({})"}.get(kind, "{}")
    labelled = kind != "values"  # a value is its own label
    first = ["file", "label"] if labelled else ["file"]
    writer.writerow([*first, *(cell(shown.format(name)) for name in model.class_names)])
    for one in predictions:
        values = (f"{one.values[name]:.6f}" for name in model.class_names)
        writer.writerow([cell(one.file), *([cell(one.label)] if labelled else []), *values])
    return text.getvalue()


def _json(predictions: Sequence[Prediction], kind: str) -> str:
    rows = [{"file": one.file, "label": one.label, kind: one.values} for one in predictions]
    return to_json(rows, indent=2) + "\n"


def _write_masks(predictions: Sequence[Prediction], folder: Path) -> None:
    """Write each mask as a PNG of class numbers, named after its image."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    names = [_mask_name(one.file) for one in predictions]
    if len(set(names)) < len(names):
        raise ArgumentError("two of the files have one name: predict them in separate commands")
    for name, one in zip(names, predictions, strict=True):
        Image.fromarray(np.asarray(one.mask)).save(folder / name)


def _mask_name(file: str) -> str:
    """Return ``scan.png`` of ``a/scan.jpg``, and ``scans-3.png`` of ``scans.npz[3]``."""
    stem, _, row = Path(file).name.partition(".npz[")
    return f"{stem}-{row.rstrip(']')}.png" if row else f"{Path(file).stem}.png"
