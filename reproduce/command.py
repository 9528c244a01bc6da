"""``python -m reproduce``: the paper's tables and figures, each by one command."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpbam.app.cli.output import console, number, table
from dpbam.app.runs.files import write_atomic
from dpbam.errors import ArgumentError
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from reproduce.outcome import Outcome
    from reproduce.recipes import Recipe
    from reproduce.records import Job


_GIB = 2**30


def run(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="table1, pooled, fig1 to fig7, exact, lambda, flatness, tuning, all or others.",
            metavar="[EXPERIMENT]",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="A recipe of your own, in place of an experiment.", metavar="FILE"),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="pocket (hours on two cores), desk (days) or full (the paper's).")
    ] = "pocket",
    seeds: Annotated[
        int | None, typer.Option(help="Paired seeds, in place of the recipes'.", min=1)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Train only runs whose names match, such as 'bam-epsilon-10-*'; repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time, each in its own process.")] = 1,
    out: Annotated[Path, typer.Option(help="Records, tables and figures.")] = Path(
        "reproduce/results"
    ),
    work: Annotated[Path, typer.Option(help="Run folders.")] = Path("runs/reproduce"),
    docs: Annotated[
        Path | None,
        typer.Option(
            help="With all: also write results.md here, and the details into ../reproduce/pages. "
            "With bias-methods or laptop: the page of its own."
        ),
    ] = None,
    pneumonia: Annotated[
        Path | None, typer.Option(help="pneumoniamnist.npz [next to the downloads].")
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            help="Train every N-th run, from the I-th on: the share of one of N machines.",
            metavar="I/N",
        ),
    ] = "1/1",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is missing and what it costs.")
    ] = False,
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Train nothing: report on what is there.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Only take real steps, of one run per arm.", min=1)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="With --steps: images per step, in place of the recipe's.")
    ] = None,
) -> None:
    """Train what is missing, then write the table or figure next to the paper's, with verdicts.

    Each finished run leaves a small record; the same command again, also after a kill, keeps those
    and resumes unfinished runs. A claim is reproduced, not reproduced, or inconclusive by the 95% t
    interval of paired differences. With n machines, each takes --shard i/n; concatenate their
    files of records.

    Examples:
        $ python -m reproduce fig2
        $ python -m reproduce all --jobs 2
        $ python -m reproduce table1 --scale desk --only 'dp-sgd-epsilon-10-*'
        $ python -m reproduce all --shard 3/8
        $ python -m reproduce table1 --scale full --dry-run
        $ python -m reproduce table1 --scale full --steps 1 --batch-size 8
        $ python -m reproduce all --only-report --docs docs
        $ python -m reproduce --recipe mine.toml
    """
    from reproduce.index import chosen, recipes_of, take_times
    from reproduce.records import missing

    if (experiment is None) == (recipe is None):
        raise ArgumentError("give an experiment, such as table1, or a recipe with --recipe FILE")
    names = [] if experiment is None else chosen(experiment, scale)
    if docs is not None:
        _check_docs(experiment, seeds)
    recipes = recipes_of(names, scale) if recipe is None else [_own(recipe)]
    if pneumonia is not None:
        _set_pneumonia(pneumonia)
    if dry_run:
        _show_costs(recipes, out, seeds)
        return
    if steps is not None:
        _take_steps(recipes, steps, batch_size)
        return
    if not only_report:
        if scale == "full":  # days of training: what it takes is said before it begins
            _show_costs(recipes, out, seeds)
        _train(missing(recipes, out, seeds, only or (), _shard(shard), work), out, jobs)
        take_times(names, out)
    if experiment is None:
        _report_own(recipes[0], out, seeds)
        return
    _report(names, scale, out, seeds)
    if docs is not None:
        _write_pages(experiment, out, docs)


def _own(path: Path) -> Recipe:
    from reproduce.recipes import OWN, read_recipe

    if not path.is_file():
        raise ArgumentError(f"there is no recipe {path}: write one as docs/reproduce.md shows")
    return read_recipe(path, OWN)


def _report_own(recipe: Recipe, out: Path, seeds: int | None) -> None:
    from reproduce.outcome import Study
    from reproduce.own import judge
    from reproduce.records import finished
    from reproduce.results_page import write_outcome

    records = finished(recipe, out, seeds)
    if not records:
        console().print(f"{recipe.name}: no finished run yet", markup=False)
        return
    result = judge(Study(recipe, records, len(recipe.runs(seeds))))
    paths = write_outcome(result, out / recipe.scale, recipe.scale)
    _show(result)
    console().print(f"Written: {', '.join(map(str, paths))}", markup=False, soft_wrap=True)


def _set_pneumonia(path: Path) -> None:
    from reproduce.small_data import PNEUMONIA

    os.environ[PNEUMONIA] = str(path.absolute())  # worker processes inherit it


def _shard(text: str) -> tuple[int, int]:
    first, _, machines = text.partition("/")
    if not (first.isdecimal() and machines.isdecimal() and 1 <= int(first) <= int(machines)):
        raise ArgumentError(f"--shard must be I/N with 1 <= I <= N, such as 3/8, got {text!r}")
    return int(first), int(machines)


def _train(jobs: list[Job], out: Path, processes: int) -> None:
    from dpbam.app.cli.progress import RunsDisplay, resumable
    from reproduce.records import carry_out

    if not jobs:
        return
    with (
        resumable(out),
        RunsDisplay([run.name for _, run in jobs], list(map(relative_cost, jobs))) as display,
    ):
        carry_out(jobs, out, processes=processes, watcher=display)


def relative_cost(job: Job) -> float:
    """Return the cost of a run in pixels seen by DP-SGD."""
    from dpbam.app.cli.progress import cost

    recipe, run = job
    return cost(run.config) * recipe.images * math.prod(recipe.shape[1:])


def _report(names: list[str], scale: str, out: Path, seeds: int | None) -> None:
    from reproduce.index import outcomes
    from reproduce.results_page import write_outcome

    screen = console()
    for name, result in outcomes(names, scale, out, seeds).items():
        if result is None:
            screen.print(f"{name}: no finished run yet", markup=False)
            continue
        paths = write_outcome(result, out / scale, scale)
        _show(result)
        screen.print(f"Written: {', '.join(str(p) for p in paths)}", markup=False, soft_wrap=True)


def _check_docs(experiment: str | None, seeds: int | None) -> None:
    """Refuse to write pages from one experiment or from some of the seeds alone."""
    from reproduce.index import ALL, EXPERIMENTS

    with_pages = [ALL, *(name for name, each in EXPERIMENTS.items() if each.page is not None)]
    if experiment not in with_pages:
        raise ArgumentError(
            f"--docs writes pages about several experiments, not about {experiment or 'a recipe'} "
            f"alone: give {', '.join(with_pages[:-1])} or {with_pages[-1]} in its place"
        )
    if seeds is not None:
        raise ArgumentError("--docs writes pages of all seeds: leave out --seeds")


def _write_pages(experiment: str, out: Path, docs: Path) -> None:
    """Write the pages of all experiments at all scales, or the page of one that has its own."""
    from reproduce.index import ALL, EXPERIMENTS, PAPERS, outcome, outcomes
    from reproduce.results_page import PAGE_SCALES, STUDIES, write_figures, write_pages

    if experiment == ALL:
        paths = write_pages({scale: outcomes(PAPERS, scale, out) for scale in PAGE_SCALES}, docs)
        console().print(f"Written: {', '.join(map(str, paths))}", markup=False, soft_wrap=True)
        return
    chosen, scale = EXPERIMENTS[experiment], EXPERIMENTS[experiment].scales[0]
    result = outcome(experiment, scale, out)
    if result is not None and chosen.page is not None:
        write_figures(result.figures, docs.parent / STUDIES / scale, formats=(".svg",))
        path = docs.parent / (chosen.page_path or f"{STUDIES}/{experiment}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, chosen.page(result))
        console().print(f"Written: {path}", markup=False, soft_wrap=True)


def _show(result: Outcome) -> None:
    screen = console()
    for each in result.tables:
        screen.print(table(each.header, each.rows, title=result.title, left=2))
    if result.claims:
        rows = [(claim.text, claim.verdict, claim.sentence()) for claim in result.claims]
        header = ("claim", "verdict", "difference [95% interval]")
        screen.print(table(header, rows, title=f"{result.title}: claims", left=3))


def _show_costs(recipes: list[Recipe], out: Path, seeds: int | None) -> None:
    """Print a table per recipe: runs, steps, sigma, memory, and time here and on a GPU."""
    from dpbam.app.runs.preparation import duration
    from reproduce.cost import GPU, recipe_costs

    screen, hours, seconds = console(), 0.0, 0.0
    for recipe in recipes:
        costs = recipe_costs(recipe, out, seeds)
        rows = [
            (c.name, f"{c.done}/{c.asked}", c.steps, number(c.noise_multiplier),
             f"{max(0.01, c.step.bytes / _GIB):.2f} GiB", duration(c.step.seconds * c.steps),
             f"{max(0.01, c.gpu_hours):.2f} h")
            for c in costs
        ]  # fmt: skip
        header = ("run", "done", "steps", "sigma", "memory", "here", "GPU")
        screen.print(table(header, rows, title=f"{recipe.scale} {recipe.name}: {recipe.title}"))
        hours += sum(c.gpu_hours_left for c in costs)
        seconds += sum(c.seconds_left for c in costs)
    missing = "nothing"
    if seconds:
        missing = (
            f"{duration(seconds)} on this machine, one run after the other, or "
            f"{max(0.01, hours):.2f} GPU hours on {GPU}"
        )
    screen.print(
        f"Missing: {missing}. Times are of one run: of steps on blank images, scaled to a run. "
        "Memory is that of a step.",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def _take_steps(recipes: list[Recipe], steps: int, batch_size: int | None) -> None:
    """Take real steps on the real data, which two cores can do even at full size."""
    from dpbam.data import DataError
    from reproduce.cost import take_steps

    screen = console()
    for recipe in recipes:
        for run in recipe.runs(1)[: len(recipe.arms)]:
            try:
                trial = take_steps(run.config, steps, recipe.images, batch_size)
            except DataError as error:
                screen.print(f"{recipe.name}: {error}", markup=False, soft_wrap=True)
                break
            losses = ", ".join(f"{before:.3f} -> {after:.3f}" for before, after in trial.losses)
            screen.print(
                f"{recipe.scale} {recipe.name}, {run.arm}: {steps} steps of {trial.rows} images "
                f"in {trial.seconds:.0f} s, loss {losses}, epsilon {up(trial.epsilon)}",
                markup=False, soft_wrap=True,
            )  # fmt: skip
