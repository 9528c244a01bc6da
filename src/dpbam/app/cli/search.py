"""``dpbam search``: hyper-parameters by random search, and what the search costs in privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dpbam import _validate
from dpbam.app.cli.flags import ConfigFile, merged, settings_as_flags
from dpbam.app.cli.output import Json, console, facts, note, option, print_json, say, table, warn
from dpbam.app.cli.progress import resumable
from dpbam.app.runs import prepare
from dpbam.app.runs.config import ConfigError
from dpbam.app.search.result import BEST, SearchResult, conclude
from dpbam.app.search.search import METHODS, Search
from dpbam.app.search.space import parse_space
from dpbam.app.search.study import do_trials
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_label, metric_text

_SHOWN = 10  # trials of each stage in the table


@settings_as_flags(leave_out=("method",))
def search(
    flags: dict[str, object],
    out: Annotated[Path, option("A folder for all trials and result.json.")],
    pay: Annotated[
        str | None, option("How the search is paid for: public, nothing or accounted; required.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        option("NAME=LOW..HIGH[:log], or NAME=A,B,C; repeatable."),
    ] = None,
    space: Annotated[Path | None, option("A .toml file of the same.", common=False)] = None,
    method: Annotated[
        list[str] | None, option("A stage each [dp-sgd, dp-sat, bam]; repeatable.")
    ] = None,
    trials: Annotated[int, option("Trials of each stage; if accounted, their mean.")] = 20,
    score: Annotated[
        str | None, option("accounted: public, or noised=S (noise on the count).", common=False)
    ] = None,
    distribution: Annotated[
        str, option("accounted: of the number: poisson or negative-binomial.", common=False)
    ] = "poisson",
    shape: Annotated[float, option("Of negative-binomial; 1: geometric.", common=False)] = 1.0,
    workers: Annotated[int, option("Trials at a time, each in its process.", common=False)] = 1,
    shard: Annotated[
        str, option("I/N: every N-th trial, the share of one of N machines.", common=False)
    ] = "1/1",
    config: ConfigFile = None,
    dry_run: Annotated[
        bool, option("Show what would be searched and its cost.", "--dry-run")
    ] = False,
    json: Json = False,
) -> None:
    """Search for hyper-parameters: DP-SGD's first, then lambda for DP-SAT and BAM.

    Every trial is a run folder. The same command again keeps finished trials and resumes the
    others. With n machines, copy the folder with its study.json to each, and run --shard i/n.

    Without --model it searches for small-cnn: model auto, the default of dpbam train, needs no
    search, since its settings follow from public facts.

    Examples:
        $ dpbam search --data digits --epsilon 3 --pay public --vary lr=1e-3..1e-1:log --out runs/s
        $ dpbam search --data scans --epsilon 3 --pay accounted --score public --vary
            lr=1e-3..1e-1:log --trials 10 --out runs/s
        $ dpbam search --config run.toml --space space.toml --pay nothing --workers 2 --out runs/s
    """
    if pay is None:
        raise ConfigError(
            "a search needs --pay, how it is paid for: public (the data is not sensitive), "
            "accounted (its cost is part of epsilon) or nothing (epsilon will not cover it)"
        )
    _validate.count("--workers", workers)
    search = Search(
        settings={k: v for k, v in merged(config, flags).items() if k != "method"},
        space=parse_space(vary or (), space),
        pay=pay,
        methods=tuple(method or METHODS),
        trials=trials,
        distribution=distribution,
        shape=shape,
        score_noise=score_noise(pay, score),
    ).calibrated()
    if dry_run:
        say(facts(_plan(search), title="search"))
        return
    if pay == "nothing":
        console(stderr=True).print("[bold red]not accounted:[/] epsilon will not cover this search")
    for warning in prepare(search.first_config()).defects():
        warn(warning)
    with resumable(out, "trials"):
        study = do_trials(search, out, shard=_shard(shard), workers=workers, log=note)
    if lacking := study.lacking():  # this share is done
        note(lacking)
        return
    result = conclude(study)
    if json:
        print_json(result.to_dict())
    else:
        show(result, out)


def score_noise(pay: str, text: str | None) -> float | None:
    """Return the noise that ``--score`` asks for; None: the test records are public.

    Example:
        >>> score_noise("accounted", "noised=10"), score_noise("accounted", "public")
        (10.0, None)
    """
    if pay != "accounted":
        if text is not None:
            raise ConfigError(f"--score goes with --pay accounted, not with --pay {pay}")
        return None
    kind, _, noise = (text or "").partition("=")
    if kind == "public" and not noise:
        return None
    try:
        if kind == "noised":
            return float(noise)
    except ValueError:
        pass
    raise ConfigError(
        "an accounted search needs --score public (the test records are not sensitive) or --score "
        "noised=S (S: deviation of the noise on the number of them that is right, such as 20)"
    )


def _shard(text: str) -> tuple[int, int]:
    first, _, machines = text.partition("/")
    if not (first.isdecimal() and machines.isdecimal() and 1 <= int(first) <= int(machines)):
        raise ConfigError(f"--shard must be I/N with 1 <= I <= N, such as 3/8, got {text!r}")
    return int(first), int(machines)


def _plan(search: Search) -> dict[str, object]:
    """Return what would be searched, as names and texts."""
    stages = {stage.method: ", ".join(map(str, stage.space.values())) for stage in search.stages()}
    rows: dict[str, object] = {**stages, "trials of each": search.trials, "paid": search.pay}
    if search.accounted:
        rows["trials of each"] = search.selection.describe()
        rows["a trial's sigma"] = search.settings["noise_multiplier"]
    return rows


def show(result: SearchResult, out: Path) -> None:
    """Print the best trials of each stage, the best of all, and how they were paid for."""
    search, study = result.search, result.study
    whom = ", for the operator only" if search.accounted else ""
    for stage in search.stages():
        trials = sorted(study.scores(stage), key=lambda trial: -trial.score)[:_SHOWN]
        say(f"{stage.method}: the best {len(trials)} of {study.count(stage)} trials{whom}")
        rows = [
            (t.number, *(_cell(t.settings.get(name, "")) for name in stage.space),
             metric_text(t.metric, t.score))
            for t in trials
        ]  # fmt: skip
        say(table(("trial", *stage.space, "score"), rows, left=1))
    best, trial = result.best, result.trial
    if best is None or trial is None:
        say("No trial was drawn: nothing is released. That happens with Poisson's 0.")
        return
    chosen = {"method": best.method, **best.settings}
    say(facts({
        "best": ", ".join(f"{name} {_cell(value)}" for name, value in chosen.items()),
        "score": f"{metric_label(best.metric)} {metric_text(best.metric, best.score)}",
        "epsilon": f"{up(result.epsilon)} at delta {result.delta:g}",
    }))  # fmt: skip
    inner = out / "non-private"
    say(f"To publish: {out / BEST}, {out / 'result.json'}; for the operator only: {inner}, "
        f"in which its run folder is {trial.path.relative_to(inner)}")  # fmt: skip
    style = {"nothing": "bold red", "accounted": "green"}.get(search.pay, "")
    console().print(result.statement(), markup=False, soft_wrap=True, style=style)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
