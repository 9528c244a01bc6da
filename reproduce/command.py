"""``python -m reproduce``: the paper's tables and figures, each by one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpbam.app.cli.boundary import INTERRUPTED
from dpbam.app.cli.output import console, examples, number, table
from dpbam.errors import ArgumentError
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from reproduce.jobs import Job
    from reproduce.outcome import Outcome
    from reproduce.recipes import Recipe

EXAMPLES = examples(
    "python -m reproduce fig2",
    "python -m reproduce all --jobs 2",
    "python -m reproduce table1 --scale desk --only 'dp-sgd-epsilon-10-*'",
    "python -m reproduce all --shard 3/8",
    "python -m reproduce table1 --scale full --dry-run",
    "python -m reproduce table1 --scale full --steps 1 --batch-size 8",
    "python -m reproduce all --only-report --docs docs",
)
_GIB = 2**30


def run(
    experiment: Annotated[
        str,
        typer.Argument(
            help="table1, fig1 to fig7, exact, lambda, flatness, tuning, or all.",
            metavar="EXPERIMENT",
        ),
    ],
    scale: Annotated[
        str, typer.Option(help="pocket (hours on two cores), desk (days) or full (the paper's).")
    ] = "pocket",
    seeds: Annotated[
        int | None, typer.Option(help="Paired seeds, in place of the recipes'.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Train only runs whose names match, such as 'bam-epsilon-10-*'; repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time, each in its own process.")] = 1,
    out: Annotated[Path, typer.Option(help="Records, tables and figures.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Run folders.")] = Path("runs/reproduce"),
    docs: Annotated[
        Path | None, typer.Option(help="Also write results.md and its figures into this folder.")
    ] = None,
    pneumonia: Annotated[
        Path | None, typer.Option(help="pneumoniamnist.npz [beside the downloads].")
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            help="Train every N-th run, from the I-th on: one of N machines' share.", metavar="I/N"
        ),
    ] = "1/1",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is missing and what it costs.")
    ] = False,
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Train nothing: report on what is there.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Take so many real steps of one run an arm, keep nothing.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="With --steps: images a step, in place of the recipe's.")
    ] = None,
) -> None:
    """Train what is missing, then write the table or figure beside the paper's, with verdicts.

    Each finished run leaves a small record; the same command again, also after a kill, keeps those
    and goes on with what was begun. A claim is reproduced, not reproduced, or inconclusive by the
    95% t interval of paired differences. Of n machines each takes --shard i/n; their records belong
    in one folder.
    """
    from dpbam import _validate
    from reproduce.index import chosen, recipes_of, take_times
    from reproduce.jobs import missing

    names = chosen(experiment, scale)
    recipes = recipes_of(names, scale)
    if pneumonia is not None:
        _set_pneumonia(pneumonia)
    if dry_run:
        _show_costs(recipes, out, seeds)
        return
    if steps is not None:
        _take_steps(recipes, _validate.count("--steps", steps), batch_size)
        return
    if not only_report:
        _train(missing(recipes, out, seeds, only or (), _shard(shard)), work, jobs)
        take_times(names, out)
    _report(names, scale, out, seeds)
    if docs is not None:
        _write_page(experiment, out, docs, seeds)


def _set_pneumonia(path: Path) -> None:
    from reproduce.small_data import PNEUMONIA

    os.environ[PNEUMONIA] = str(path.absolute())  # processes of their own inherit it


def _shard(text: str) -> tuple[int, int]:
    """I/N as two numbers."""
    first, _, machines = text.partition("/")
    if not (first.isdecimal() and machines.isdecimal() and 1 <= int(first) <= int(machines)):
        raise ArgumentError(f"--shard must be I/N with 1 <= I <= N, such as 3/8, got {text!r}")
    return int(first), int(machines)


def _train(jobs: list[Job], work: Path, processes: int) -> None:
    from dpbam.app.compare.pool import StoppedError
    from reproduce.jobs import carry_out
    from reproduce.progress import Overall

    if not jobs:
        return
    try:
        with Overall(jobs) as overall:
            carry_out(jobs, work, processes=processes, watcher=overall)
    except StoppedError:
        message = "stopped, and saved: the same command goes on, and keeps finished runs"
        console(stderr=True).print(message, markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


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


def _write_page(experiment: str, out: Path, docs: Path, seeds: int | None) -> None:
    """Write the page, which has all scales that are trained here, whichever was just reported."""
    from reproduce.index import ALL, EXPERIMENTS, outcomes
    from reproduce.results_page import PAGE_SCALES, write_page

    names = list(EXPERIMENTS) if experiment == ALL else [experiment]
    path = write_page({s: outcomes(names, s, out, seeds) for s in PAGE_SCALES}, docs)
    console().print(f"Written: {path}", markup=False, soft_wrap=True)


def _show(result: Outcome) -> None:
    screen = console()
    for part in result.tables:
        screen.print(table(part.header, part.rows, title=result.title, left=2))
    if result.claims:
        rows = [(claim.text, claim.verdict, claim.sentence()) for claim in result.claims]
        header = ("claim", "verdict", "difference [95% interval]")
        screen.print(table(header, rows, title=f"{result.title}: claims", left=3))


def _show_costs(recipes: list[Recipe], out: Path, seeds: int | None) -> None:
    """A table a recipe: runs, steps, sigma, image passes, memory, FLOPs and GPU hours."""
    from reproduce.cost import GPU, recipe_costs

    screen, hours = console(), 0.0
    for recipe in recipes:
        costs = recipe_costs(recipe, out, seeds)
        rows = [
            (c.name, f"{c.done}/{c.asked}", c.steps, number(c.noise_multiplier), f"{c.passes:.3g}",
             f"{c.memory / _GIB:.2g} GiB, {c.rows}", f"{c.flops:.2g}", f"{c.gpu_hours:.2g} h")
            for c in costs
        ]  # fmt: skip
        header = ("run", "done", "steps", "sigma", "passes", "memory, rows", "FLOPs", "GPU")
        screen.print(table(header, rows, title=f"{recipe.scale} {recipe.name}: {recipe.title}"))
        hours += sum(c.gpu_hours_left for c in costs)
    screen.print(
        f"{hours:.3g} GPU hours are missing, taking {GPU}. Passes: images forward and backward in "
        "a run. Memory: of so many rows at once. FLOPs: counted on a step and scaled up to a run.",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def _take_steps(recipes: list[Recipe], steps: int, batch_size: int | None) -> None:
    """Real steps on the real data: what a full-size recipe can be checked by on two cores."""
    from dpbam.data import DataError
    from reproduce.cost import take_steps

    screen = console()
    for recipe in recipes:
        for arm in recipe.arms:
            config = recipe.config(arm, recipe.cells()[0], recipe.first_seed)
            try:
                found = take_steps(config, steps, batch_size)
            except DataError as error:
                screen.print(f"{recipe.name}: {error}", markup=False, soft_wrap=True)
                break
            losses = ", ".join(f"{before:.3f} -> {after:.3f}" for before, after in found.losses)
            screen.print(
                f"{recipe.scale} {recipe.name}, {arm}: {steps} steps of {found.rows} images, loss "
                f"{losses}, epsilon {up(found.epsilon)}",
                markup=False, soft_wrap=True,
            )  # fmt: skip
