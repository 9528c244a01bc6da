"""``dpbam compare``: several methods, paired seeds, one table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from dpbam import _validate
from dpbam.app.cli.flags import ConfigFile, merged, require_data, settings_as_flags
from dpbam.app.cli.output import Json, option, print_json, say, table, warn
from dpbam.app.cli.progress import RunsDisplay, cost, resumable
from dpbam.app.compare.comparison import (
    Comparison,
    Contender,
    choose_once,
    compare,
    plan_runs,
)
from dpbam.app.report.groups import mean_score
from dpbam.app.report.tables import difference_text
from dpbam.app.runs import RunSpec
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_label

_ENOUGH = 5
METHODS = ("dp-sgd", "dp-sat", "bam")


@settings_as_flags(leave_out=("method", "seed"))
def compare_methods(
    flags: dict[str, object],
    out: Annotated[Path, option("A folder for all runs and comparison.json.")],
    method: Annotated[
        list[str] | None,
        option(
            "METHOD or METHOD:LAMBDA, also bam-exact or module:Name, then ,SETTING=VALUE; "
            "repeatable, the baseline first."
        ),
    ] = None,
    seeds: Annotated[int, option("How many paired seeds.")] = 3,
    first_seed: Annotated[int, option("The first of them.", common=False)] = 0,
    jobs: Annotated[int, option("Runs at a time, each in its own process.")] = 1,
    include_non_private: Annotated[
        bool, option("Add SGD without privacy.", "--include-non-private")
    ] = False,
    share_noise: Annotated[
        bool, option("Research only: the same noise in all methods.", "--share-noise", common=False)
    ] = False,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Train several methods with paired seeds, and compare their accuracy.

    Runs of one seed share data order and initial weights, not noise. The same command again keeps
    finished runs and resumes the others. Seeded runs are for research: do not publish their models.

    Without --model all train small-cnn: auto, the default of dpbam train, may solve a head in
    closed form, which has no method to compare. With --model auto it chooses once for all.

    Examples:
        $ dpbam compare --data digits --epsilon 3 --method dp-sgd --method bam:0.02 --out runs/both
        $ dpbam compare --data digits --epsilon 3 --method bam:0.02 --method bam:0.05 --method
            bam-exact:0.02 --seeds 5 --out runs/lambdas
        $ dpbam compare --data digits --epsilon 3 --method dp-sgd --method dp-sgd,clipping=slaclip
            --method bam:0.02,filter=doppler --out runs/rivals
        $ dpbam compare --config run.toml --seeds 5 --jobs 2 --include-non-private --out runs/five
    """
    settings = {k: v for k, v in merged(config, flags).items() if k not in ("method", "seed")}
    _validate.count("--seeds", seeds)
    runs = plan_runs(
        choose_once(settings),
        [Contender.parse(text) for text in method or METHODS],
        range(_validate.count("--first-seed", first_seed, least=0), first_seed + seeds),
        out,
        include_non_private=include_non_private,
        share_noise=share_noise,
    )
    require_data(settings)
    result = carry_out(runs, out, jobs, json)
    if json:
        print_json(result.to_dict())
    else:
        show(result, out)


def carry_out(runs: list[RunSpec], out: Path, jobs: int, quiet: bool) -> Comparison:
    """Do the runs, with a bar unless ``quiet``."""
    with resumable(out):
        if quiet:
            return compare(runs, out, jobs=jobs, warn=warn)
        with RunsDisplay([run.name for run in runs], [cost(run.config) for run in runs]) as display:
            return compare(runs, out, jobs=jobs, watcher=display, warn=warn)


def show(result: Comparison, out: Path) -> None:
    """Print the means, the paired differences, and what the figures mean."""
    baseline, *others = result.names
    count = len(result.scores(baseline))
    means = [_mean(result, name) for name in result.names]
    title = f"{count} paired seeds, mean [95% t interval], points"
    header = ("contender", "epsilon", f"test {metric_label(result.metric)}", "SD", "per run")
    say(table(header, means, title=title))
    if others:
        against = [(name, *_against(result, name)) for name in others]
        header = ("contender", "difference", "d_z", "visible from", "verdict")
        say(table(header, against, title=f"Paired, against {baseline}"))
    cost = up(result.total_epsilon())
    models = ", ".join(sorted({run.spec.config.model for run in result.runs}))
    lines = [
        "Verdict: better or worse where the 95% interval of the paired difference excludes 0. "
        "d_z: mean over SD of the paired differences. Visible from: the true difference that this "
        "many seeds would show in 80% of repetitions."
    ]
    lines += [f"Every method trained {models}; dpbam train alone chooses a model (--model auto)."]
    lines += [f"Publishing all private runs together would cost epsilon {cost}."]
    lines += ["They are seeded, so that the noise can be recomputed: research only."]
    if count < _ENOUGH:
        lines += [f"With fewer than {_ENOUGH} seeds the intervals are wide."]
    lines += [f"Results: {out / 'comparison.json'}; every run has its folder in {out}"]
    say("\n".join(lines))


def _mean(result: Comparison, name: str) -> tuple[str, str, str, str, str]:
    runs, mean = [run for run in result.runs if run.arm == name], result.mean(name)
    seconds = sum(run.seconds for run in runs) / len(runs)
    if diverged := _diverged(result, name):
        return name, up(runs[0].epsilon), diverged, "", f"{seconds:.0f} s"
    scores = [run.score for run in runs]
    points = mean_score(scores, result.metric, lambda score: f"{100 * score:.1f}")
    return (
        name, up(runs[0].epsilon), points, _one_point(mean.deviation), f"{seconds:.0f} s"
    )  # fmt: skip


def _against(result: Comparison, name: str) -> tuple[str, str, str, str]:
    baseline = result.names[0]
    if diverged := _diverged(result, name) or _diverged(result, baseline, f"{baseline} "):
        return diverged, "", "", "diverged"
    difference = result.difference(name)
    size = difference.effect_size
    effect = "" if math.isnan(size) else f"{size:+.2f}"
    return (
        difference_text(difference, "accuracy"), effect, _one_point(difference.smallest_detectable),
        difference.verdict,
    )  # fmt: skip


def _diverged(result: Comparison, name: str, subject: str = "") -> str:
    """Say how many runs of a contender diverged, whose size means nothing; empty if none did."""
    count, runs = result.diverged(name), len(result.scores(name))
    return f"{subject}diverged ({count} of {runs} seeds)" if count else ""


def _one_point(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f}"
