"""Claims about accuracy: Table 1, exact against approximate BAM, and lambda."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dpbam.app.report.charts import Series, dots, lines
from dpbam.app.report.figure import Figure
from dpbam.app.runs import RunRecord
from dpbam.estimates import LEVEL, Estimate
from dpbam.privacy.rounding import up
from reproduce import recipes
from reproduce.claims import Claim
from reproduce.drawings import with_zero_line
from reproduce.outcome import (
    LAST,
    Arms,
    Outcome,
    Reading,
    Study,
    TextTable,
    bias_share,
    difference_of,
    mean_of,
    over_cells,
    points,
    readings,
    shared_seeds,
)

METHODS = {
    "dp-sgd": "DP-SGD",
    "dp-sat": "DP-SAT",
    "bam": "BAM",
    "bam-exact": "BAM, exact",
    "dp-sat-tuned": "DP-SAT, lambda tuned",
    "bam-tuned": "BAM, lambda tuned",
}
_LAST_NOTE = (
    "Last weights: the same runs without the average of the weights, as in the paper. SD is from "
    "seed to seed."
)
_SWEPT = {
    "pocket": ("lambda", "CIFAR-10 as in Table 1, epsilon 2."),
    "desk": (
        "lambda over theta's norm",
        "An MLP on CIFAR-10, epsilon 10; the runs are those of "
        "[when BAM helps](#when-does-bam-help).",
    ),
    "full": ("lambda", "CIFAR-10 as in Table 1, epsilon 2."),
}
_LENS = {
    "bias of the trained model": "bias",
    "over the gradient's length": "relative_bias",
    "cosine": "cosine",
    "cosine with noise": "private_cosine",
}
_RIVALS = {
    "bam": ("dp-sgd", "dp-sat"),
    "bam-tuned": ("dp-sgd", "dp-sat-tuned"),
    "dp-sat": ("dp-sgd",),  # which the paper does not claim
}
SAME_ACCURACY = 0.01  # the margin within which exact and approximate BAM are the same
_GRADIENTS = {"bam": "approximate (Eq. 12)", "bam-exact": "exact (Eq. 11)"}


def table1(studies: Sequence[Study]) -> Outcome:
    """Compare with the paper's Table 1, and add the paired differences that it lacks."""
    trained = [study for study in studies if study.records]
    return Outcome(
        "table1",
        "Table 1: test accuracy",
        tables=[
            *(_accuracies(study, *each) for study in trained for each in readings(study).items()),
            *(table for study in trained if (table := _lens(study)).rows),
        ],
        figures=[f for study in trained if (f := _differences_figure(study)) is not None],
        claims=[
            claim
            for study in trained
            for each in readings(study).items()
            for claim in _better(study, *each)
        ],
        notes=[
            "Mean over the seeds with its 95% t interval, in percent, and SD, next to the paper's "
            "mean and SD over three seeds. The paper's numbers are of full-size training: compare "
            "the differences, not the levels.",
            *([_LAST_NOTE] if any(len(readings(study)) > 1 for study in trained) else []),
            *(note for study in trained for note in _floor_notes(study)),
        ],
        studies=studies,
    )


def _accuracies(study: Study, which: str, reading: Reading) -> TextTable:
    """One row per epsilon and method: accuracy, SD, the paper's, the difference to DP-SGD."""
    rows = []
    for cell in study.recipe.cells():
        arms = study.arms(cell)
        for arm, by_seed in arms.items():
            mean = mean_of(by_seed, reading)
            against = "" if arm == "dp-sgd" else _paired(arms, arm, "dp-sgd", reading)
            rows.append((
                _data(study), up(cell['epsilon']), METHODS[arm],
                points(mean), "" if mean.count < 2 else f"{100 * mean.deviation:.2f}",
                paper_value(study.recipe.name, cell["epsilon"], arm), against, str(mean.count),
            ))  # fmt: skip
    shown = f"accuracy, {which}" if which else "accuracy"
    header = ("data", "epsilon", "method", shown, "SD", "paper", "against DP-SGD", "seeds")
    return TextTable(header, rows)


def _lens(study: Study) -> TextTable:
    """One row per epsilon and method: the bias of the trained models that were measured."""
    rows = []
    for cell in study.recipe.cells():
        for arm, by_seed in study.arms(cell).items():
            seen = {seed: record for seed, record in by_seed.items() if record.non_private_bias}
            if seen and study.recipe.lens:
                measured = [row for record in seen.values() for row in record.non_private_bias]
                means = (_mean(measured, name) for name in _LENS.values())
                rows.append((
                    _data(study), up(cell["epsilon"]), METHODS[arm], *(f"{m:.3g}" for m in means),
                    f"{bias_share(measured):.2g}", str(len(seen)),
                ))  # fmt: skip
    return TextTable(("data", "epsilon", "method", *_LENS, "bias share", "seeds"), rows)


def _data(study: Study) -> str:
    return study.recipe.name.removeprefix("table1-")


def _mean(measured: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(float(row["non_private_against_plain"][name]) for row in measured)


def _paired(arms: Arms, one: str, other: str, reading: Reading) -> str:
    if not set(arms[one]) & set(arms.get(other, {})):
        return ""
    return points(difference_of(arms[one], arms[other], reading), signed=True, digits=2)


def _better(study: Study, which: str, reading: Reading) -> list[Claim]:
    """Judge each pair of rivals at each epsilon, and over all of them."""
    return [
        claim
        for one, others in _RIVALS.items()
        for other in others
        for claim in _better_than(study, one, other, which, reading)
    ]


def _better_than(study: Study, one: str, other: str, which: str, reading: Reading) -> list[Claim]:
    title = study.recipe.title.partition(" at ")[0].removeprefix("Accuracy on ")
    claims, each = [], []
    for cell in study.recipe.cells():
        arms = study.arms(cell)
        if not set(arms.get(one, {})) & set(arms.get(other, {})):
            continue
        each.append(arms)
        difference = difference_of(arms[one], arms[other], reading)
        place, missed = f"{title}, epsilon {up(cell['epsilon'])}", _missed(study, arms)
        claims.append(_above(place, (one, other), difference, study, which, missed=missed))
        if study.recipe.resolution and (one, other) == ("bam", "dp-sgd") and which != LAST:
            claims.append(_same(place, difference, study.recipe.resolution, missed=missed))
    if len(each) > 1 and shared_seeds(each, one, other):
        difference = over_cells(each, one, other, reading)
        missed = any(_missed(study, arms) for arms in each)
        place = f"{title}, all epsilons"
        claims.append(_above(place, (one, other), difference, study, which, missed=missed))
    return claims


def _above(
    place: str,
    pair: tuple[str, str],
    difference: Estimate,
    study: Study,
    which: str,
    *,
    missed: bool,
) -> Claim:
    one, other = (METHODS[arm] for arm in pair)
    said = f"{one}, is" if "," in one else f"{one} is"
    statement = f"{said} more accurate than {other}"
    papers = pair[0].startswith("bam") and _is_papers(study) and "all epsilons" not in place
    return Claim(
        f"{place}{f', {which}' * bool(which)}: {statement}", "above", difference, "points",
        floor_missed=missed, resolution=study.recipe.resolution, reading=which,
        paper="Table 1" * papers, headline=f"{place}: {statement}" * papers,
    )  # fmt: skip


def _is_papers(study: Study) -> bool:
    """Whether the paper's Table 1 has this data set."""
    return study.recipe.name in {row["recipe"] for row in paper()["table1"]}


def _same(place: str, difference: Estimate, margin: float, *, missed: bool) -> Claim:
    text = f"{place}: BAM and DP-SGD differ by less than {100 * margin:g} points"
    return Claim(text, "same", difference, "points", margin, floor_missed=missed)


def _missed(study: Study, arms: Arms) -> bool:
    """Whether DP-SGD's interval is not above the floor."""
    floor = study.recipe.floor
    if floor is None:
        return False
    return "dp-sgd" not in arms or not mean_of(arms["dp-sgd"]).low > floor


def _floor_notes(study: Study) -> list[str]:
    if study.recipe.floor is None:
        return []
    floor = f"{100 * study.recipe.floor:g}%"
    return [f"{study.recipe.name}: a verdict needs DP-SGD above {floor}, with its whole interval."]


def paper_value(recipe: str, epsilon: float, arm: str) -> str:
    """Look up the paper's Table 1; empty where it has no value.

    Example:
        >>> paper_value("table1-cifar10", 2.0, "bam")
        '68.2 ± 0.27'
    """
    for row in paper()["table1"]:
        if (row["recipe"], row["epsilon"]) == (recipe, epsilon):
            mean, *deviation = row.get(arm, [""])
            return f"{mean}" + (f" ± {deviation[0]:.2f}" if deviation else "")
    return ""


def paper() -> dict[str, Any]:
    """Read the paper's numbers from ``reproduce/recipes/paper.toml``."""
    return tomllib.loads((recipes.recipes_folder() / "paper.toml").read_text(encoding="utf-8"))


def exact(studies: Sequence[Study]) -> Outcome:
    """Compare exact BAM (Eq. 11) with the approximation (Eq. 12)."""
    study = studies[0]
    rows, claims = [], []
    for cell in study.recipe.cells():
        arms, epsilon = study.arms(cell), up(cell["epsilon"])
        rows += [
            (epsilon, _GRADIENTS[arm], points(mean_of(by_seed)), f"{_seconds(by_seed):.0f} s",
             str(len(by_seed)))
            for arm, by_seed in arms.items()
        ]  # fmt: skip
        if not shared_seeds([arms], "bam", "bam-exact"):
            continue
        statement = "exact BAM is as accurate as its approximation, to within a point"
        for which, reading in readings(study).items():
            difference = difference_of(arms["bam-exact"], arms["bam"], reading)
            claims.append(Claim(
                f"Epsilon {epsilon}{f', {which}' * bool(which)}: {statement}", "same", difference,
                "points", SAME_ACCURACY, resolution=study.recipe.resolution, reading=which,
                paper="Section 6", headline=f"CIFAR-10, epsilon {epsilon}: {statement}",
            ))  # fmt: skip
    return Outcome(
        "exact",
        "Exact against approximate BAM",
        tables=[TextTable(("epsilon", "BAM", "accuracy", "time per run", "seeds"), rows)],
        claims=claims,
        notes=[f"CIFAR-10 as in Table 1, lambda {study.records[0].config['lam']:g}. The margin of "
               "a point is about as large as the paper's gain of BAM over DP-SGD. Times are "
               "wall-clock times on a machine that did other work, too."],
        studies=studies,
    )  # fmt: skip


def _seconds(by_seed: Mapping[int, RunRecord]) -> float:
    return sum(record.seconds for record in by_seed.values()) / len(by_seed)


def sweep(studies: Sequence[Study]) -> Outcome:
    """Judge whether lambda matters: every lambda against DP-SGD, which is lambda 0."""
    arms = studies[0].arms()
    by_lambda = {
        arm: 0.0 if arm == "dp-sgd" else _lambda(next(iter(by_seed.values())))
        for arm, by_seed in arms.items()
    }
    order = sorted(by_lambda, key=by_lambda.__getitem__)
    others = [
        arm for arm in order if arm != "dp-sgd" and set(arms[arm]) & set(arms.get("dp-sgd", {}))
    ]
    level = 1 - (1 - LEVEL) / max(1, len(others))
    name = _SWEPT[studies[0].recipe.scale][0]
    against = {arm: difference_of(arms[arm], arms["dp-sgd"], level=level) for arm in others}
    rows = [
        (f"{by_lambda[arm]:g}", points(mean_of(arms[arm])),
         points(against[arm], signed=True, digits=2) if arm in against else "", str(len(arms[arm])))
        for arm in order
    ]  # fmt: skip
    claims = [
        Claim(f"{name} matters: {by_lambda[arm]:g} differs from 0", "different", gain, "points")
        for arm, gain in against.items()
    ]
    return Outcome(
        "lambda",
        "BAM's lambda",
        tables=[TextTable((name, "accuracy", "against 0", "seeds"), rows)],
        figures=[_sweep_figure(arms, by_lambda, order, name)] if len(others) > 1 else [],
        claims=claims,
        notes=[f"{_SWEPT[studies[0].recipe.scale][1]} The intervals of the differences are widened "
               f"for {len(others)} comparisons (Bonferroni): together they hold at 95%."],
        studies=studies,
    )  # fmt: skip


def _lambda(record: RunRecord) -> float:
    """lambda, or its share of |theta| where that is set."""
    lam = record.config.get("lam")
    return float(record.config["lam_share"] if lam is None else lam)


def _sweep_figure(
    arms: Arms, by_lambda: Mapping[str, float], order: Sequence[str], name: str
) -> Figure:
    swept = [arm for arm in order if by_lambda[arm] > 0]
    means = [mean_of(arms[arm]) for arm in swept]
    series = Series(
        "BAM", 2, tuple(by_lambda[arm] for arm in swept), tuple(e.mean for e in means),
        tuple(e.low for e in means), tuple(e.high for e in means), style="points",
    )  # fmt: skip
    marks = ((mean_of(arms["dp-sgd"]).mean, "DP-SGD"),) if "dp-sgd" in arms else ()
    panel = lines("", name, "test accuracy", [series], percent=True, log_x=True, marks=marks)
    caption = f"Mean accuracy of BAM over the seeds, with its 95% t interval, against {name}."
    return Figure("lambda", "Accuracy against lambda", caption, "public", [panel])


def _differences_figure(study: Study) -> Figure | None:
    """Draw the paired differences to DP-SGD with their intervals, in points."""
    rows = []
    for cell in study.recipe.cells():
        arms = study.arms(cell)
        for arm in (arm for arm in METHODS if arm != "dp-sgd"):
            if len(set(arms.get(arm, {})) & set(arms.get("dp-sgd", {}))) > 1:
                difference = difference_of(arms[arm], arms["dp-sgd"])
                rows.append((f"{METHODS[arm]}, epsilon {up(cell['epsilon'])}", difference))
    if not rows:
        return None
    values = Series(
        "", 0, [name for name, _ in rows], tuple(100 * e.mean for _, e in rows),
        tuple(100 * e.low for _, e in rows), tuple(100 * e.high for _, e in rows),
    )  # fmt: skip
    panel = with_zero_line(dots("", "points above DP-SGD", [values], percent=False))
    return Figure(
        study.recipe.name, study.recipe.title,
        "Paired differences in test accuracy to DP-SGD, mean and 95% t interval over the seeds.",
        "public", [panel],
    )  # fmt: skip
