"""``dpbam search``: hyper-parameters by random search, and what the search costs in privacy."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from dpbam import _validate
from dpbam.app.cli.flags import ConfigFile, merged, require_data, settings_as_flags
from dpbam.app.cli.output import Json, console, facts, note, option, print_json, say, warn
from dpbam.app.cli.progress import resumable
from dpbam.app.runs import prepare
from dpbam.app.runs.config import ConfigError
from dpbam.app.search.search import Search, parse_space
from dpbam.app.search.study import BEST, SearchResult, conclude, do_trials
from dpbam.privacy.rounding import up


@settings_as_flags()
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
    trials: Annotated[int, option("How many trials; if accounted, their mean.")] = 20,
    score: Annotated[
        str | None, option("accounted: public, or noised=S (noise on the count).", common=False)
    ] = None,
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
    """Search for hyper-parameters at random, and release the best model alone.

    Every trial is a run folder. The same command again keeps finished trials and resumes the
    others. With n machines, copy the folder with its study.json to each, and run --shard i/n.

    Without --model it searches for small-cnn: model auto, the default of dpbam train, needs no
    search, since its settings follow from public facts.

    Examples:
        $ dpbam search --data digits --epsilon 3 --pay public --vary lr=1e-3..1e-1:log --out runs/s
        $ dpbam search --data scans --epsilon 3 --pay accounted --score public --vary
            lr=1e-3..1e-1:log --trials 10 --out runs/s
        $ dpbam search --config run.toml --vary lam=0.002..0.2:log --method bam --pay nothing
            --workers 2 --out runs/s
    """
    if pay is None:
        raise ConfigError(
            "a search needs --pay, how it is paid for: public (the data is not sensitive), "
            "accounted (its cost is part of epsilon) or nothing (epsilon will not cover it)"
        )
    _validate.count("--workers", workers)
    search = Search(
        settings=merged(config, flags),
        space=parse_space(vary or ()),
        pay=pay,
        trials=trials,
        score_noise=score_noise(pay, score),
    ).calibrated()
    require_data(search.settings)
    if dry_run:
        number = search.describe_number() if search.accounted else search.trials
        rows: dict[str, object] = {
            "varied": ", ".join(map(str, search.space.values())), "trials": number, "paid": pay,
        }  # fmt: skip
        if search.accounted:
            rows["a trial's sigma"] = search.settings["noise_multiplier"]
        say(facts(rows, title="search"))
        return
    if pay == "nothing":
        console(stderr=True).print("[bold red]not accounted:[/] epsilon will not cover this search")
    for warning in prepare(search.end_config(0)).defects():
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
        show(result)


def score_noise(pay: str, text: str | None) -> float | None:
    """Return the noise that ``--score`` asks for; None: the test records are public.

    Example:
        >>> score_noise("accounted", "noised=10"), score_noise("accounted", "public")
        (10.0, None)
    """
    if text == ("public" if pay == "accounted" else None):
        return None
    with suppress(ValueError):
        if pay == "accounted" and text is not None and text.startswith("noised="):
            return float(text.removeprefix("noised="))
    raise ConfigError(
        "--score goes with --pay accounted, which needs it: --score public (the test records are "
        "not sensitive) or --score noised=S (S: deviation of the noise on the number of them that "
        "is right, such as 20)"
    )


def _shard(text: str) -> tuple[int, int]:
    first, _, machines = text.partition("/")
    if not (first.isdecimal() and machines.isdecimal() and 1 <= int(first) <= int(machines)):
        raise ConfigError(f"--shard must be I/N with 1 <= I <= N, such as 3/8, got {text!r}")
    return int(first), int(machines)


def show(result: SearchResult) -> None:
    """Print the best trial, where it is, and how the search was paid for."""
    study, best, trial = result.study, result.best, result.trial
    if best is None or trial is None:
        say("No trial was drawn: nothing is released. That happens with Poisson's 0.")
        return
    say(facts({
        "best": str(best),
        "epsilon": f"{up(result.epsilon)} at delta {result.delta:g}",
        "to publish": f"{study.out / BEST}, {study.out / 'result.json'}",
        "for the operator": f"{study.inner}; the best is {trial.path.relative_to(study.inner)}",
    }))  # fmt: skip
    style = {"nothing": "bold red", "accounted": "green"}.get(study.search.pay, "")
    console().print(result.statement(), markup=False, soft_wrap=True, style=style)
