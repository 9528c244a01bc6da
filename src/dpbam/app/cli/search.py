"""``dpbam search``: hyper-parameters by Optuna, and what the search costs in privacy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpbam.app.cli.boundary import INTERRUPTED
from dpbam.app.cli.flags import merged, with_flags
from dpbam.app.cli.output import console, examples, facts, percent, print_json, table
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from dpbam.app.search.result import SearchResult
    from dpbam.app.search.search import Search
    from dpbam.app.search.studies import StageStudy

EXAMPLES = examples(
    "dpbam search --data digits --epsilon 3 --pay public --vary lr=1e-3..1e-1:log --out runs/s",
    "dpbam search --data scans --epsilon 3 --pay accounted --score public --vary lr=1e-3..1e-1:log "
    "--trials 10 --out runs/s",
    "dpbam search --config run.toml --space space.toml --pay nothing --sampler tpe --workers 2 "
    "--storage postgresql://host/db --out runs/s",
)
_SHOWN = 10  # trials of each stage in the table
_ENOUGH = 10  # trials from which on importances say something


def _search(
    flags: dict[str, Any],
    out: Annotated[Path, typer.Option(help="A folder for all trials and result.json.")],
    pay: Annotated[
        str, typer.Option(help="How the search is paid for: public, nothing or accounted.")
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(help="NAME=LOW..HIGH[:log], or NAME=A,B,C; repeatable."),
    ] = None,
    space: Annotated[Path | None, typer.Option(help="A .toml file of the same.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A stage each [dp-sgd, dp-sat, bam]; repeatable.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Of each stage; accounted: their mean.")] = 20,
    sampler: Annotated[str, typer.Option(help="random, tpe or qmc.")] = "random",
    pruner: Annotated[str, typer.Option(help="none, median or hyperband.")] = "none",
    score: Annotated[
        str | None, typer.Option(help="accounted: public, or noised=S (noise on the count).")
    ] = None,
    distribution: Annotated[
        str, typer.Option(help="accounted: of the number: poisson or negative-binomial.")
    ] = "poisson",
    shape: Annotated[float, typer.Option(help="Of negative-binomial; 1: geometric.")] = 1.0,
    workers: Annotated[int, typer.Option(help="Trials at a time, each in its process.")] = 1,
    storage: Annotated[
        str | None, typer.Option(help="A database that several machines share [a file in out].")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the search, in a shared database.")] = "search",
    config: Annotated[
        Path | None, typer.Option(help="A .toml file of settings; flags override it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be searched and its cost.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Search for hyper-parameters: DP-SGD's first, then lambda for DP-SAT and BAM.

    Every trial is a run folder. The same command again keeps finished trials and goes on with the
    others; with one --storage, on several machines at once.
    """
    from dpbam import _validate
    from dpbam.app.search.search import METHODS, Search, require_optuna
    from dpbam.app.search.space import parse_space

    require_optuna()
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
        console().print(facts(_plan(search), title="search"))
        return
    result = carry_out(search, out, storage, name, workers)
    if json:
        print_json(result.to_dict())
    else:
        show(result, out)


run = with_flags(_search, leave_out=("method",))


def score_noise(pay: str, text: str | None) -> float | None:
    """The noise that ``--score`` asks for; None: the test records are public.

    Example:
        >>> score_noise("accounted", "noised=10"), score_noise("accounted", "public")
        (10.0, None)
    """
    from dpbam.app.runs.config import ConfigError

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
    from dpbam.app.compare.pool import StoppedError
    from dpbam.app.search.result import conclude
    from dpbam.app.search.trials import do_trials

    screen = console(stderr=True)

    def tell(text: str) -> None:
        screen.print(text, markup=False, soft_wrap=True)

    if search.pay == "nothing":
        screen.print("[bold red]not accounted:[/] epsilon will not cover this search")
    try:
        studies = do_trials(search, out, url=storage, name=name, workers=workers, tell=tell)
    except StoppedError:
        tell(f"stopped, and saved in {out}: the same command goes on, and keeps finished trials")
        raise typer.Exit(INTERRUPTED) from None
    return conclude(search, studies, out)


def show(result: SearchResult, out: Path) -> None:
    """The trials, the best of them, and how they were paid for."""
    screen = console()
    for stage in result.stages:
        screen.print(_table(stage, result.search.accounted))
        if weights := importances(stage):
            told = ", ".join(f"{k} {percent(v, 0)}" for k, v in weights.items())
            screen.print(f"importance for {stage.stage.method} (Optuna): {told}", markup=False)
    if result.best is None:
        screen.print("No trial was drawn: nothing is released. That happens with Poisson's 0.")
        return
    found = {k: v for k, v in result.to_dict()["best"].items() if k != "score"}
    rows = {
        "best": ", ".join(f"{k} {_cell(v)}" for k, v in found.items()),
        "score": percent(result.best[1].value or 0.0),
        "epsilon": f"{up(result.epsilon)} at delta {result.delta:g}",
    }
    screen.print(facts(rows))
    screen.print(_where(result, out), markup=False, soft_wrap=True)
    style = {"nothing": "bold red", "accounted": "green"}.get(result.search.pay, "")
    screen.print(result.statement(), markup=False, soft_wrap=True, style=style)


def _where(result: SearchResult, out: Path) -> str:
    """What may be published, and where the operator finds the rest."""
    from dpbam.app.search.result import BEST

    trial, best = result.trial, out / BEST
    if trial is None or not best.exists():
        return "It was trained on another machine: the same command there makes its folder."
    return (
        f"To publish: {best}, {out / 'result.json'}; for the operator alone: {out / 'non-private'},"
        f" in which its run folder is {trial.path.relative_to(out / 'non-private')}"
    )


def importances(stage: StageStudy) -> dict[str, float]:
    """How much of the scores' variance each parameter explains, by Optuna; empty if too few."""
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
    """The best trials of a stage, best first."""
    ordered = sorted(stage.trials(), key=lambda t: -(t.value if t.value is not None else -1.0))
    names = list(stage.stage.space)
    rows = [
        (
            t.number,
            t.state.name.lower(),
            *(_cell(t.params.get(n, "")) for n in names),
            "" if t.value is None else percent(t.value),
        )
        for t in ordered[:_SHOWN]
    ]
    whom = ", for the operator only" if accounted else ""
    title = f"{stage.stage.method}: the best {len(rows)} of {stage.count} trials{whom}"
    return table(("trial", "state", *names, "score"), rows, title=title, left=2)


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
