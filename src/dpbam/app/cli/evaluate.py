"""``dpbam evaluate``: how good a run's model is, as a whole, by class and by sub-group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpbam.app.cli.output import console, examples, facts, percent, print_json, table

if TYPE_CHECKING:
    from rich.console import Console

    from dpbam.app.runs import RunModel
    from dpbam.app.runs.metrics import Evaluation, Scores, Share
    from dpbam.data import DataSet

EXAMPLES = examples(
    "dpbam evaluate runs/digits --data digits",
    "dpbam evaluate runs/scans --data ./scans --by sex --by folder1 --save",
    "dpbam evaluate runs/scans --data other-hospital.npz --json",
)
CAVEAT = (
    "These figures come from the records themselves, without noise: on private held-out records "
    "they are a release of their own, which the run's epsilon does not cover."
)
_MOST_COLUMNS = 12  # of a confusion matrix that fits on a screen


def run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    data: Annotated[
        str | None, typer.Option(help="A data set, as for train. By default the run's own.")
    ] = None,
    split: Annotated[str, typer.Option(help="test, val, train or all.")] = "test",
    by: Annotated[
        list[str] | None, typer.Option(help="A column of sub-groups, repeatable.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Column of the unit of privacy, if a part is held out.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where downloads live.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    model: Annotated[
        str | None, typer.Option(help="The run's own module:function, which you trust to be run.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the JSON in the run's non-private folder.")
    ] = False,
) -> None:
    """Evaluate a run's model on labelled data, as a whole, by class and by sub-group.

    Accuracy with a 95% Wilson interval, balanced accuracy, AUC, calibration error, the confusion
    matrix, and the worst sub-group.
    """
    from dpbam.app.runs import load_run_model
    from dpbam.app.runs.predict import evaluate_dataset

    loaded = load_run_model(run, device=device, own_model=model)
    dataset = _load(run, loaded, data, split, unit, data_root)
    result = evaluate_dataset(loaded, dataset, by or ())
    report = {"data": dataset.name, "split": split, **result.to_dict(), "note": CAVEAT}
    saved = _save(run, split, report) if save else None
    if json:
        print_json(report)
    else:
        _show(console(), dataset, result)
    if saved:
        console(stderr=True).print(f"saved as {saved}", markup=False, soft_wrap=True)


def _load(
    run: Path, model: RunModel, data: str | None, split: str, unit: str | None, root: Path | None
) -> DataSet:
    """The data set, resized to what the model takes; the run's own is held out as the run did."""
    from dpbam.app.runs import stored_config
    from dpbam.app.runs.own_code import check_code
    from dpbam.data import load

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


def _save(run: Path, split: str, report: dict[str, Any]) -> Path:
    from dpbam.app.runs.files import write_json

    path = run / "non-private" / f"evaluation-{split}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, report)
    return path


def _show(screen: Console, dataset: DataSet, result: Evaluation) -> None:
    scores = result.scores
    screen.print(
        facts(
            {
                "data": f"{dataset.name}, {len(dataset)} records",
                "accuracy": f"{_share(scores.accuracy)} (95% Wilson)",
                "balanced accuracy": percent(scores.balanced_accuracy),
                "AUC": _figure(scores.auc),
                "calibration error": percent(scores.calibration_error),
            }
        )
    )
    rows = [(name, share.count, _share(share)) for name, share in result.classes.items()]
    screen.print(table(("class", "records", "recognised"), rows))
    for column in result.groups:
        _show_groups(screen, column, result)
    if len(result.classes) <= _MOST_COLUMNS:
        counts = zip(result.classes, result.confusion.tolist(), strict=True)
        screen.print(
            table(("label \\ predicted", *result.classes), [(name, *row) for name, row in counts])
        )
    screen.print(CAVEAT, markup=False, soft_wrap=True)


def _show_groups(screen: Console, column: str, result: Evaluation) -> None:
    worst = result.worst(column)
    rows = [_group(name, s, name == worst) for name, s in result.groups[column].items()]
    header = (column, "records", "accuracy", "balanced", "AUC", "calibration error")
    screen.print(table(header, rows, title=f"by {column}; the worst is {worst}"))


def _group(name: str, scores: Scores, worst: bool) -> tuple[object, ...]:
    return (
        f"{name or '(none)'}{' <- worst' if worst else ''}",
        scores.accuracy.count,
        _share(scores.accuracy),
        percent(scores.balanced_accuracy),
        _figure(scores.auc),
        percent(scores.calibration_error),
    )


def _share(share: Share) -> str:
    if not share.count:
        return "-"
    low, high = share.interval
    return f"{percent(share.value)} [{percent(low)}, {percent(high)}]"


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
