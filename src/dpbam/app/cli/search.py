"""``dpbam search``: hyper-parameters by Optuna, and what the search costs in privacy."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dpbam import _validate
from dpbam.app.cli.flags import ConfigFile, merged, with_flags
from dpbam.app.cli.output import Json, console, facts, note, option, percent, print_json, say, table
from dpbam.app.cli.progress import resumable
from dpbam.app.runs.config import ConfigError
from dpbam.app.search.result import BEST, SearchResult, conclude
from dpbam.app.search.search import METHODS, Search
from dpbam.app.search.space import parse_space
from dpbam.app.search.studies import StageStudy, do_trials
from dpbam.privacy.rounding import up
from dpbam.training.events import metric_label, metric_text

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_SHOWN = 10  # trials of each stage in the table
_ENOUGH = 10  # trials for importances to mean something


def _search(
    flags: dict[str, Any],
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
    sampler: Annotated[str, option("random, tpe or qmc.", common=False)] = "random",
    pruner: Annotated[str, option("none, median or hyperband.", common=False)] = "none",
    score: Annotated[
        str | None, option("accounted: public, or noised=S (noise on the count).", common=False)
    ] = None,
    distribution: Annotated[
        str, option("accounted: of the number: poisson or negative-binomial.", common=False)
    ] = "poisson",
    shape: Annotated[float, option("Of negative-binomial; 1: geometric.", common=False)] = 1.0,
    workers: Annotated[int, option("Trials at a time, each in its process.", common=False)] = 1,
    storage: Annotated[
        str | None, option("A database that several machines share [a file in out].", common=False)
    ] = None,
    name: Annotated[
        str, option("Name of the search in a shared database.", common=False)
    ] = "search",
    config: ConfigFile = None,
    dry_run: Annotated[
        bool, option("Show what would be searched and its cost.", "--dry-run")
    ] = False,
    json: Json = False,
) -> None:
    """Search for hyper-parameters: DP-SGD's first, then lambda for DP-SAT and BAM.

    Every trial is a run folder. The same command again keeps finished trials and resumes the
    others; with one --storage, on several machines at once.

    Examples:
        $ dpbam search --data digits --epsilon 3 --pay public --vary lr=1e-3..1e-1:log --out runs/s
        $ dpbam search --data scans --epsilon 3 --pay accounted --score public --vary
            lr=1e-3..1e-1:log --trials 10 --out runs/s
        $ dpbam search --config run.toml --space space.toml --pay nothing --sampler tpe --workers 2
            --storage postgresql://host/db --out runs/s
    """
    if find_spec("optuna") is None:
        raise ConfigError("a search needs optuna: pip install 'dpbam[search]'")
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
        sampler=sampler,
        pruner=pruner,
        distribution=distribution,
        shape=shape,
        score_noise=score_noise(pay, score),
    ).calibrated()
    if dry_run:
        say(facts(_plan(search), title="search"))
        return
    result = carry_out(search, out, storage, name, workers)
    if json:
        print_json(result.to_dict())
    else:
        show(result, out)


COMMANDS = {"search": with_flags(_search, leave_out=("method",))}


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


def carry_out(
    search: Search, out: Path, storage: str | None, name: str, workers: int
) -> SearchResult:
    """Do the trials, with a line for each on stderr."""
    if search.pay == "nothing":
        console(stderr=True).print("[bold red]not accounted:[/] epsilon will not cover this search")
    with resumable(out, "trials"):
        studies = do_trials(search, out, url=storage, name=name, workers=workers, log=note)
    return conclude(search, studies, out)


def show(result: SearchResult, out: Path) -> None:
    """Print the trials, the best of them, and how they were paid for."""
    for stage in result.stages:
        say(_table(stage, result.search.accounted))
        if weights := importances(stage):
            listed = ", ".join(f"{k} {percent(v, 0)}" for k, v in weights.items())
            say(f"importance for {stage.stage.method} (Optuna): {listed}")
    if result.best is None:
        say("No trial was drawn: nothing is released. That happens with Poisson's 0.")
        return
    found = {k: v for k, v in result.to_dict()["best"].items() if k != "score"}
    rows = {
        "best": ", ".join(f"{k} {_cell(v)}" for k, v in found.items()),
        "score": _score(result.best[1], named=True),
        "epsilon": f"{up(result.epsilon)} at delta {result.delta:g}",
    }
    say(facts(rows))
    say(_where(result, out))
    style = {"nothing": "bold red", "accounted": "green"}.get(result.search.pay, "")
    console().print(result.statement(), markup=False, soft_wrap=True, style=style)


def _where(result: SearchResult, out: Path) -> str:
    """Return what may be published, and where the operator finds the rest."""
    trial, best = result.trial, out / BEST
    if trial is None or not best.exists():
        return "It was trained on another machine: the same command there makes its folder."
    return (
        f"To publish: {best}, {out / 'result.json'}; for the operator only: {out / 'non-private'},"
        f" in which its run folder is {trial.path.relative_to(out / 'non-private')}"
    )


def importances(stage: StageStudy) -> dict[str, float]:
    """Return the share of the scores' variance that each parameter explains; empty if too few."""
    from optuna.exceptions import OptunaError
    from optuna.importance import get_param_importances

    done = [t for t in stage.trials() if t.value is not None]
    if len(done) < _ENOUGH or len(stage.stage.space) < 2:
        return {}
    try:
        return dict(get_param_importances(stage.study))
    except (OptunaError, ValueError, RuntimeError):  # such as scores that are all alike
        return {}


def _table(stage: StageStudy, accounted: bool) -> Any:
    """Return the best trials of a stage, best first."""
    ordered = sorted(stage.trials(), key=lambda t: -(t.value if t.value is not None else -math.inf))
    names = list(stage.stage.space)
    rows = [
        (
            t.number,
            t.state.name.lower(),
            *(_cell(t.params.get(n, "")) for n in names),
            _score(t),
        )
        for t in ordered[:_SHOWN]
    ]
    whom = ", for the operator only" if accounted else ""
    title = f"{stage.stage.method}: the best {len(rows)} of {stage.count} trials{whom}"
    return table(("trial", "state", *names, "score"), rows, title=title, left=2)


def _score(trial: FrozenTrial, *, named: bool = False) -> str:
    """Return a trial's score as the kind of metric that it is; empty if it has none."""
    if trial.value is None:
        return ""
    metric = trial.user_attrs.get("metric", "accuracy")
    shown = metric_text(metric, trial.value)
    return f"{metric_label(metric)} {shown}" if named else shown


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plan(search: Search) -> dict[str, object]:
    rows: dict[str, object] = {
        stage.method: ", ".join(_domain(d) for d in stage.space.values())
        for stage in search.stages()
    }
    rows["trials of each"] = search.trials
    rows["paid"] = search.pay
    if search.accounted:
        rows["trials of each"] = search.repetitions.describe()
        rows["a trial's sigma"] = float(search.settings["noise_multiplier"])
    return rows


def _domain(domain: Any) -> str:
    if domain.choices:
        return f"{domain.name} in {', '.join(map(str, domain.choices))}"
    return f"{domain.name} {domain.low:g}..{domain.high:g}{' (log)' if domain.log else ''}"
