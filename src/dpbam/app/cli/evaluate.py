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
from typing import Annotated

import numpy as np
import typer

from dpbam import _validate
from dpbam._names import did_you_mean
from dpbam.app.cli.output import (
    Json,
    facts,
    note,
    option,
    print_json,
    say,
    table,
    to_json,
    warn,
)
from dpbam.app.cli.progress import counting
from dpbam.app.runs import RunModel, load_run_model, stored_config
from dpbam.app.runs.documents import SavedEvaluation, Statement
from dpbam.app.runs.escaping import cell
from dpbam.app.runs.files import plain, write_atomic
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.meaning import check_code
from dpbam.app.runs.predict import (
    Prediction,
    evaluate_dataset,
    files_in,
    predict_files,
    summaries,
)
from dpbam.data import DataError, DataSet, load
from dpbam.data.split import is_held_out
from dpbam.errors import ArgumentError
from dpbam.tasks.base import Words
from dpbam.tasks.scores import Evaluation, explain_no_gain, is_useless, metric_label, metric_text

CAVEAT = (
    "These figures come from the records themselves, without noise: on records that are not public "
    "they are a release of their own, which the run's epsilon does not cover."
)
FORMATS = ("csv", "json")
_MOST_COLUMNS = 12  # of a confusion matrix that fits on a screen
_NOT_COLUMNS = ("value", "threshold")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Device = Annotated[str, option("cpu, cuda, ...")]
Threshold = Annotated[list[str] | None, option("Of findings: 0.3, or NAME=0.3; repeatable. [0.5]")]
ThresholdFrom = Annotated[
    str | None, option("A data set that you declare public: thresholds of the best F1 on it.")
]
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
    of_the_run = split == "test" and _is_test_set(run, dataset)
    if split == "test" and not of_the_run and is_held_out(dataset):
        _refuse_other_split(run, dataset, unit)
    at = _thresholds(run, loaded, threshold, threshold_from, data_root, label_column)
    result = evaluate_dataset(loaded, dataset, by or (), at)
    report = {
        "data": dataset.name, "split": split, "test_set_of_the_run": of_the_run, **result.to_dict(),
        "note": CAVEAT,
    }  # fmt: skip
    if is_useless(result.compared) is not False:
        warn(explain_no_gain(result.compared))
    if json:
        print_json(report)
    else:
        show(dataset, result, loaded.task.words)
    if save:
        path = run / "non-private" / f"evaluation-{split}.json"
        path.parent.mkdir(exist_ok=True)
        SavedEvaluation.model_validate(plain(report)).write(path)
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
    if masks is not None and not loaded.task.targets_are_images:
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
        warn(" ".join(str(error).split()))
    if not predictions:
        raise DataError(f"none of the {len(paths)} files could be read: nothing was written")
    if resized := sum(one.resized for one in predictions):
        _, height, width = loaded.image_shape
        images = "image was" if resized == 1 else "images were"
        note(f"{resized} {images} resized to {height}x{width}")
    if masks is not None:
        _write_masks(predictions, masks)
        note(f"{len(predictions)} masks in {masks}, pixels of class numbers from 0")
    text = _csv(predictions, loaded) if format == "csv" else _json(predictions, loaded)
    if out is None:
        print(text, end="")
    else:
        write_atomic(out, text)
        note(f"{len(predictions)} images predicted, written to {out}")
    if unreadable:
        note(f"{len(unreadable)} of {len(paths)} files could not be read, and are left out")
        raise typer.Exit(1)


def _thresholds(
    run: Path, model: RunModel, texts: list[str] | None, public: str | None, root: Path | None,
    columns: list[str] | None,
) -> dict[str, float]:  # fmt: skip
    """Return the thresholds of findings that were given, or that are best on a public set."""
    if not texts and public is None:
        return {}
    if not model.task.has_thresholds:
        raise ArgumentError(
            f"thresholds are for findings, and this model does {model.task.name}: leave them out"
        )
    best: dict[str, float] = {}
    if public is not None:
        dataset = _load(run, model, public, "train", None, root, columns)
        best = model.task.best_thresholds(*summaries(model, dataset))
        note(f"thresholds from {dataset.name}, which you declare public: "
             + ", ".join(f"{name} {value:.3f}" for name, value in best.items()))  # fmt: skip
    return {**best, **parse_thresholds(texts or (), model.class_names)}


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
    load_by = partial(
        load, str(data), split=split, root=root, image_size=(height, width), channels=convertible,
        task=model.task.layout, label_columns=columns or (), dicom_window=model.dicom_window,
    )  # fmt: skip
    if unit is None and config is not None and config.unit is not None:
        with suppress(DataError):  # if it is not for want of the column, it is raised again
            return load_by(unit=config.unit)
    return load_by(unit=unit)


def _is_test_set(run: Path, dataset: DataSet) -> bool:
    """Whether these are the test records of the run, by content: a path may lead elsewhere.

    Columns, such as those of sub-groups, may have changed since. A folder without the run's facts
    has only its statement: the name and size of the test set, not how it was held out.
    """
    folder = RunFolder(run)
    if folder.started:
        known = folder.read_facts().non_private_test_records
        return known == replace(dataset, columns={}).fingerprint()
    statement = _statement(folder)
    if is_held_out(dataset) or statement is None:
        return False
    stated = statement.evaluated_on
    return (stated.set, stated.records) == (dataset.name, len(dataset))


def _refuse_other_split(run: Path, dataset: DataSet, unit: str | None) -> None:
    """Refuse a held-out part that may not be the run's: it may hold records of the training."""
    folder = RunFolder(run)
    if folder.started:
        raise ArgumentError(
            f"{dataset.name} is not what the run held out, so the model may have been trained on "
            "its records: restore the run's data and leave --unit out, or pass --split all for "
            "data that the run never saw"
        )
    statement = _statement(folder)
    stated = None if statement is None else statement.unit_name
    if unit is None or stated not in (None, unit):
        named = "the --unit of its training" if stated is None else f"--unit {stated}"
        raise ArgumentError(
            f"{run} has no record of what the run held out, so the model may have been trained on "
            f"records of {dataset.name}: pass {named}, or --split all for data that the run never "
            "saw"
        )


def _statement(folder: RunFolder) -> Statement | None:
    return Statement.read(folder.statement_json) if folder.statement_json.exists() else None


def parse_thresholds(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Read ``0.3`` (of all findings) and ``oedema=0.3``.

    Example:
        >>> parse_thresholds(["0.3", "effusion=0.6"], ["oedema", "effusion"])
        {'oedema': 0.3, 'effusion': 0.6}
    """
    thresholds: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if name and name not in names:
            hint = did_you_mean(name, names)
            raise ArgumentError(f"--threshold names {name!r}, which is no finding: {hint}")
        try:
            threshold = float(value)
        except ValueError:
            threshold = math.nan
        if not 0 < threshold < 1:
            raise ArgumentError(f"--threshold must be like 0.3 or NAME=0.3, got {text!r}")
        thresholds |= {name: threshold} if name else dict.fromkeys(names, threshold)
    return thresholds


def show(dataset: DataSet, result: Evaluation, words: Words) -> None:
    """Print the metrics of all records, of each class and of each sub-group."""
    metric, main = result.metric, metric_label(result.metric)
    values = {metric_label(name): metric_text(name, value) for name, value in result.scores.items()}
    kind = "Wilson" if metric == "accuracy" else "bootstrap"
    values[main] += f" {_interval(metric, result.interval)} (95% {kind})"
    values["best constant"] = f"{main} {metric_text(metric, result.trivial)}"
    scores_by_class = {name: one.scores for name, one in result.classes.items()}
    at = {k: one["threshold"] for k, one in scores_by_class.items() if "threshold" in one}
    if at:  # one of all findings, or each one's: a column would make the table too wide
        same = len(set(at.values())) == 1
        listed = [f"{name} {value:.3f}" for name, value in at.items()]
        values["threshold"] = f"{next(iter(at.values())):.3f}" if same else ", ".join(listed)
    say(facts({"data": f"{dataset.name}, {len(dataset)} records", **values}))
    if result.classes:
        heading = "recognised" if metric == "accuracy" else main
        others = [k for k in next(iter(scores_by_class.values())) if k not in _NOT_COLUMNS]
        rows = [
            (label, one.count, _with_interval(metric, one.scores["value"], one.interval),
             *(metric_text(k, one.scores[k]) for k in others))
            for label, one in result.classes.items()
        ]  # fmt: skip
        say(table(("class", words.counted, heading, *map(_narrow, others)), rows))
    for column, groups in result.groups.items():
        worst, names = result.worst(column), list(result.scores)
        rows = [
            (f"{group or '(none)'}{' <- worst' if group == worst else ''}", one.count,
             _with_interval(metric, one.scores[metric], one.interval),
             *(metric_text(k, one.scores[k]) for k in names if k != metric))
            for group, one in groups.items()
        ]  # fmt: skip
        header = (column, "records", *map(_narrow, names))
        say(table(header, rows, title=f"by {column}; the worst is {worst}"))
    confusion = result.figures.get("confusion", [])
    if confusion and len(confusion) <= _MOST_COLUMNS and words.counted == "records":
        rows = [(name, *row) for name, row in zip(result.classes, confusion, strict=True)]
        say(table(("label \\ predicted", *result.classes), rows))
    say(CAVEAT)


def _with_interval(metric: str, value: float, interval: Sequence[float] | None) -> str:
    if interval is None or math.isnan(value):
        return metric_text(metric, value)
    return f"{metric_text(metric, value)} {_interval(metric, interval)}"


def _interval(metric: str, edges: Sequence[float]) -> str:
    return f"[{', '.join(metric_text(metric, edge) for edge in edges)}]"


def _narrow(metric: str) -> str:
    """Return a metric's name for a column: one word per line, none of which is broken."""
    return metric_label(metric).replace(" ", "\n")


def _csv(predictions: Sequence[Prediction], model: RunModel) -> str:
    text, words = io.StringIO(), model.task.words
    writer = csv.writer(text, lineterminator="\n")
    first = ["file", "label"] if words.labelled else ["file"]
    writer.writerow([*first, *(cell(words.column.format(name)) for name in model.class_names)])
    for file, row, _ in predictions:
        values = (f"{row.values[name]:.6f}" for name in model.class_names)
        writer.writerow([cell(file), *([cell(row.label)] if words.labelled else []), *values])
    return text.getvalue()


def _json(predictions: Sequence[Prediction], model: RunModel) -> str:
    kind = model.task.words.values
    rows = [{"file": file, "label": row.label, kind: row.values} for file, row, _ in predictions]
    return to_json(rows, indent=2) + "\n"


def _write_masks(predictions: Sequence[Prediction], folder: Path) -> None:
    """Write each mask as a PNG of class numbers, named after its image."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    names = [_mask_name(one.file) for one in predictions]
    if len(set(names)) < len(names):
        raise ArgumentError("two of the files have one name: predict them in separate commands")
    for name, one in zip(names, predictions, strict=True):
        Image.fromarray(np.asarray(one.row.mask)).save(folder / name)


def _mask_name(file: str) -> str:
    """Return ``scan.png`` of ``a/scan.jpg``, and ``scans-3.png`` of ``scans.npz[3]``."""
    stem, _, row = Path(file).name.partition(".npz[")
    return f"{stem}-{row.rstrip(']')}.png" if row else f"{Path(file).stem}.png"
