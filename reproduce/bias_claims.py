"""Claims about bias: Figures 1, 2, 4, 5, 6 and 7 of the paper, and the flatness of the minima.

A reading of a run is its mean over the last quarter of the measured steps; in the batch-size study,
over all of them, as in the paper, but at the epochs that all sizes have in common. Bias and cosine
are against the plain gradient g_hat, Eq. 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from dpbam.app.report.figure import Figure
from dpbam.app.report.training_figures import Builder, bias
from dpbam.app.runs import RunRecord
from dpbam.estimates import Estimate, estimate
from reproduce import drawings
from reproduce.claims import Claim, Kind
from reproduce.outcome import (
    Arms,
    Outcome,
    Reading,
    Study,
    TextTable,
    as_groups,
    difference_of,
    mean_of,
    points,
)

PLAIN, OWN = "non_private_against_plain", "non_private_against_own"
SAME_BIAS = 0.1  # of DP-SGD's: by what DP-SAT's may differ and be called the same
PUBLIC = "CIFAR-10 is public, so what was measured without noise may be shown."


def last_quarter(record: RunRecord, key: str, reading: str = PLAIN) -> float:
    """Average a reading over the last quarter of the measured steps."""
    measured = record.non_private_bias
    tail = measured[-max(1, len(measured) // 4) :]
    return fmean(float(step[reading][key]) for step in tail)


def figure1(studies: Sequence[Study]) -> Outcome:
    """Draw what clipping does: an illustration, from no data."""
    return Outcome("fig1", "Figure 1: what clipping does", figures=[drawings.clipping()])


def figure2(studies: Sequence[Study]) -> Outcome:
    """Judge the bias over training: BAM lowers it, DP-SAT does not."""
    trained = [study for study in studies if study.records]
    return Outcome(
        "fig2", "Figure 2: bias over training",
        tables=[overview(study.arms(), _net_of(study)) for study in trained],
        figures=[f for study in trained for f in _drawn(bias, study, _figure_name(study))],
        claims=[c for study in trained for c in _less_bias(study, is_last=study is trained[-1])],
        notes=["Accuracy in percent, its paired difference in points with the 95% t interval. Bias "
               "and cosines are means over the last quarter of the measured steps, against the "
               "plain gradient of the batch; the method's own gradient is what it clips. " + PUBLIC,
               *_record_notes(studies)],
        studies=studies,
    )  # fmt: skip


def _net_of(study: Study) -> str:
    return str(study.recipe.setting["model"])


def _figure_name(study: Study) -> str:
    return study.recipe.name if study.recipe.name.startswith("fig2") else "fig2"


def _less_bias(study: Study, *, is_last: bool) -> list[Claim]:
    """Judge the bias of each arm against DP-SGD's; the last study is the nearest to the paper's."""
    arms, net, claims = study.arms(), _net_of(study), []
    for arm in _others(arms, "bam"):
        less = difference_of(arms[arm], arms["dp-sgd"], _late("bias"))
        papers = is_last and next(iter(_others(arms, "bam"))) == arm
        statement = "BAM has less bias than DP-SGD"
        claims.append(_of_paper(f"{net}, {arm}", statement, "below", less, "Figure 2" * papers))
        for text, key, reference in (
            ("also relative to the gradient's length", "relative_bias", PLAIN),
            ("against its own unclipped gradient", "bias", OWN),
            ("and relative to that gradient's length", "relative_bias", OWN),
        ):
            if _has(arms, reference):
                reading = _late(key, reference)
                less = difference_of(arms[arm], arms["dp-sgd"], reading)
                claims.append(Claim(f"{net}, {arm}: {text}", "below", less))
        gain = difference_of(arms[arm], arms["dp-sgd"])
        text = f"{net}, {arm}: and it is more accurate than DP-SGD"
        claims.append(Claim(text, "above", gain, "points"))
    for arm in _others(arms, "dp-sat"):
        same = difference_of(arms[arm], arms["dp-sgd"], _late("bias"))
        margin = SAME_BIAS * mean_of(arms["dp-sgd"], _late("bias")).mean
        statement = "DP-SAT has the same bias as DP-SGD, to within 10%"
        claims.append(_of_paper(net, statement, "same", same, "Figure 2" * is_last, margin))
    return claims


def _of_paper(
    place: str, statement: str, kind: Kind, difference: Estimate, paper: str, margin: float = 0.0
) -> Claim:
    """Return a claim that is on the first page, without its place, if the paper makes it."""
    return Claim(
        f"{place}: {statement}" if place else statement, kind, difference, margin=margin,
        paper=paper, headline=statement if paper else "",
    )  # fmt: skip


def _has(arms: Arms, reference: str) -> bool:
    """Whether all runs have measured against this gradient."""
    rows = (row for by in arms.values() for r in by.values() for row in r.non_private_bias)
    return all(row.get(reference) is not None for row in rows)


def overview(arms: Arms, name: str = "arm") -> TextTable:
    """Tabulate all measurements of a study, one row per arm: means over the seeds.

    Accuracy in percent; its paired difference to the first arm in points, with its interval.
    """
    base = next(iter(arms.values()))
    readings: dict[str, Reading] = {
        "bias": _late("bias"),
        "bias / gradient": _late("relative_bias"),
        **({"against its own": _late("bias", OWN)} if _has(arms, OWN) else {}),
        "length's share": _late("magnitude_share"),
        "cosine": _late("cosine"),
        "cosine with noise": _late("private_cosine"),
    }
    if all(record.non_private_flatness for by_seed in arms.values() for record in by_seed.values()):
        readings["largest eigenvalue"] = lambda r: _flat(r, "non_private_top_eigenvalue")
    rows = []
    for arm, by_seed in arms.items():
        shared = by_seed is not base and set(by_seed) & set(base)
        difference = points(difference_of(by_seed, base), signed=True) if shared else ""
        figures = [f"{mean_of(by_seed, reading).mean:.3g}" for reading in readings.values()]
        accuracy = f"{100 * mean_of(by_seed).mean:.1f}"
        rows.append((arm, accuracy, difference, *figures, str(len(by_seed))))
    first = f"against {next(iter(arms))}"
    return TextTable((name, "accuracy", first, *readings, "seeds"), rows)


def figure4(studies: Sequence[Study]) -> Outcome:
    """Compare the alignment of the ascent direction with SAM's."""
    ascending = {arm: by for arm, by in studies[0].arms().items() if _method(by) != "dp-sgd"}
    rows = {"cosine with the batch gradient": alignment}
    claims = []
    sat = next(iter(_others(ascending, "dp-sat")), None)
    for arm in _others(ascending, "bam") if sat else ():
        difference = difference_of(ascending[arm], ascending[sat or ""], alignment)
        statement = "BAM's ascent is better aligned with SAM's than DP-SAT's (cosine)"
        papers = arm == next(iter(_others(ascending, "bam")))
        claims.append(_of_paper(arm, statement, "above", difference, "Figure 4" * papers))
    if sat:
        cosine = mean_of(ascending[sat], alignment)
        statement = "DP-SAT's ascent points against SAM's (cosine)"
        claims.append(_of_paper("", statement, "below", cosine, "Figure 4"))
    return Outcome(
        "fig4", "Figure 4: alignment of the ascent step",
        tables=[_readings(ascending, rows)],
        figures=_drawn(drawings.alignment, studies[0], "fig4"),
        claims=claims,
        notes=["Means over all measured steps but the first, at which DP-SAT does not ascend.",
               *_record_notes(studies)],
        studies=studies,
    )  # fmt: skip


def alignment(record: RunRecord) -> float:
    """Average the cosine of the ascent direction with g_hat, over the steps that have one."""
    values = [row.get("non_private_alignment") for row in record.non_private_bias]
    return fmean(float(value) for value in values if value is not None)


def figure5(studies: Sequence[Study]) -> Outcome:
    """Judge whether larger batches have less bias."""
    text = "Bigger batches have less bias: ln(bias) falls with ln(batch size)"
    studies = [at_shared_epochs(study) for study in studies]
    slopes = _slopes(studies[0], lambda r: math.log(_all(r, "bias")))
    claims = [_of_paper("", text, "below", estimate(slopes), "Figure 5")] if slopes else []
    return _by_size("fig5", "Figure 5: bias against the batch size", "bias", studies, claims)


def figure6(studies: Sequence[Study]) -> Outcome:
    """Judge whether larger batches have a better direction."""
    text = "Bigger batches have a better direction: the cosine rises with ln(batch size)"
    studies = [at_shared_epochs(study) for study in studies]
    slopes = _slopes(studies[0], lambda r: _all(r, "cosine"))
    claims = [_of_paper("", text, "above", estimate(slopes), "Figure 6")] if slopes else []
    return _by_size("fig6", "Figure 6: direction against the batch size", "cosine", studies, claims)


def at_shared_epochs(study: Study) -> Study:
    """Return the study with the measurements at the epochs, after the first step, of all sizes.

    Every size is measured at the same steps, so the largest has the fewest epochs in common: of the
    others, those nearest to them are kept. Else small batches would be measured early in training
    most of the time, and large ones late.
    """
    if not study.records:
        return study
    fewest = min(study.records, key=lambda r: len(_epochs(r)))
    wanted = [epoch for epoch in _epochs(fewest) if epoch > 0]
    return replace(study, records=[_nearest(record, wanted) for record in study.records])


def _epochs(record: RunRecord) -> list[float]:
    rate = record.plan["batch_size"] / record.plan["n"]
    return [row["step"] * rate for row in record.non_private_bias]


def _nearest(record: RunRecord, wanted: Sequence[float]) -> RunRecord:
    epochs = _epochs(record)
    nearest = [min(range(len(epochs)), key=lambda i: abs(epochs[i] - e)) for e in wanted]
    return replace(record, non_private_bias=[record.non_private_bias[i] for i in nearest])


def figure7(studies: Sequence[Study]) -> Outcome:
    """Draw the decomposition with the numbers of the runs."""
    arms = studies[0].arms()
    shown = {arm: by for arm, by in arms.items() if arm in ("dp-sgd", *_others(arms, "bam"))}
    study = replace(studies[0], records=[r for by in shown.values() for r in by.values()])
    readings: dict[str, Reading] = {
        "a": _late("a"),
        "c": _late("c_norm"),
        "length's share": _late("magnitude_share"),
        "direction's share": _late("direction_share"),
    }
    return Outcome(
        "fig7", "Figure 7: the bias decomposed",
        tables=[_readings(shown, readings)],
        figures=_drawn(drawings.decomposition, study, "fig7"),
        notes=["g_clip = a g_hat + c: |a - 1| is the error of length, c that of direction."],
        studies=studies,
    )  # fmt: skip


def flatness(studies: Sequence[Study]) -> Outcome:
    """Judge whether the minima are flatter than DP-SGD's."""
    arms = studies[0].arms()
    readings: dict[str, Reading] = {
        "largest eigenvalue": lambda r: _flat(r, "non_private_top_eigenvalue"),
        "mean per-sample norm": lambda r: _flat(r, "non_private_mean_norm"),
        "gradient norm": lambda r: _flat(r, "non_private_gradient_norm"),
        "training loss": lambda r: _flat(r, "non_private_loss"),
    }
    claims = []
    for arm in (*_others(arms, "bam"), *_others(arms, "dp-sat")):
        difference = difference_of(arms[arm], arms["dp-sgd"], readings["largest eigenvalue"])
        method = "BAM" if arm in _others(arms, "bam") else "DP-SAT"
        statement = (
            f"{method}'s minima are flatter than DP-SGD's (largest eigenvalue of the Hessian)"
        )
        papers = arm in _others(arms, "bam")[-1:]
        claims.append(_of_paper(arm, statement, "below", difference, "Appendix C" * papers))
    return Outcome(
        "flatness", "Flatness of the minima",
        tables=[_readings(arms, readings)],
        claims=claims,
        notes=["Measured on the trained models and some training images, without noise. The paper "
               "argues that BAM finds flatter minima (Appendix C), and measures none.",
               *_record_notes(studies)],
        studies=studies,
    )  # fmt: skip


def _late(key: str, reference: str = PLAIN) -> Reading:
    return lambda record: last_quarter(record, key, reference)


def _all(record: RunRecord, key: str) -> float:
    return fmean(float(step[PLAIN][key]) for step in record.non_private_bias)


def _flat(record: RunRecord, key: str) -> float:
    assert record.non_private_flatness is not None  # its recipe asks for it
    return float(record.non_private_flatness[key])


def _method(by_seed: Mapping[int, RunRecord]) -> str:
    return str(next(iter(by_seed.values())).config["method"])


def _others(arms: Arms, method: str) -> list[str]:
    """The arms of a method that share a seed with DP-SGD, or with the first arm without it."""
    base = set(arms.get("dp-sgd", next(iter(arms.values()), {})))
    return [arm for arm, by in arms.items() if _method(by) == method and base & set(by)]


def _readings(arms: Arms, readings: Mapping[str, Reading]) -> TextTable:
    """One row per arm, one column per reading."""
    rows = []
    for arm, by_seed in arms.items():
        cells = [_number(mean_of(by_seed, reading)) for reading in readings.values()]
        rows.append((arm, *cells, str(len(by_seed))))
    return TextTable(("arm", *readings, "seeds"), rows)


def _number(mean: Estimate) -> str:
    if mean.count < 2:
        return f"{mean.mean:.4g}"
    return f"{mean.mean:.4g} [{mean.low:.4g}, {mean.high:.4g}]"


def _by_arm_or_variant(study: Study) -> dict[str, dict[int, RunRecord]]:
    """The runs of each size: an arm each, or a variant each of one arm."""
    if not study.recipe.variants:
        return study.arms()
    (arm,) = study.recipe.arms
    by_variant = {v: study.arms({"at": v}).get(arm, {}) for v in study.recipe.variants}
    return {variant: by_seed for variant, by_seed in by_variant.items() if by_seed}


def _slopes(study: Study, reading: Reading) -> list[float]:
    """The least-squares slope of a reading on ln(batch size), per seed that has all sizes."""
    arms = _by_arm_or_variant(study)
    if len(arms) < len(study.recipe.variants or study.recipe.arms):
        return []
    seeds = set.intersection(*(set(by_seed) for by_seed in arms.values()))
    slopes = []
    for seed in sorted(seeds):
        runs = [by_seed[seed] for by_seed in arms.values()]
        sizes = np.log([run.plan["batch_size"] for run in runs])
        slopes.append(float(np.polyfit(sizes, [reading(run) for run in runs], 1)[0]))
    return slopes


def _by_size(
    name: str, title: str, key: str, studies: Sequence[Study], claims: Sequence[Claim]
) -> Outcome:
    readings: dict[str, Reading] = {
        "bias": lambda r: _all(r, "bias"),
        "gradient's length": lambda r: _all(r, "reference_norm"),
        "bias / gradient": lambda r: _all(r, "relative_bias"),
        "cosine": lambda r: _all(r, "cosine"),
        "cosine with noise": lambda r: _all(r, "private_cosine"),
        "accuracy": lambda r: 100 * r.accuracy,
    }
    shown = "Bias" if key == "bias" else "Direction"
    figures = [
        replace(figure, panels=[panel for panel in figure.panels if panel.title == shown])
        for figure in _drawn(drawings.batch_size, studies[0], name)
    ]
    return Outcome(
        name, title,
        tables=[_readings(_by_arm_or_variant(studies[0]), readings)],
        figures=figures,
        claims=claims,
        notes=["Means over the measured steps at the epochs that all sizes have in common, without "
               "the first step. The claim is judged by one slope per seed, over all sizes.",
               *_record_notes(studies)],
        studies=studies,
    )  # fmt: skip


def _drawn(figure: Builder, study: Study, name: str) -> list[Figure]:
    """Draw a figure from records; the data is public, and so is the figure."""
    picture = figure(as_groups(study.records))
    return [replace(picture, name=name, about="public")] if picture.panels else []


def _record_notes(studies: Sequence[Study]) -> list[str]:
    return sorted({record.note for study in studies for record in study.records if record.note})
