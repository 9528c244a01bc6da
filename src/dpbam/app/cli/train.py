"""``dpbam train``: one private training."""

from __future__ import annotations

import datetime
import os
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dpbam.app.cli.boundary import INTERRUPTED
from dpbam.app.cli.flags import ConfigFile, resumed_config, run_config, settings_as_flags
from dpbam.app.cli.output import console, facts, note, number, option, print_json, say, warn
from dpbam.app.cli.progress import JsonLinesReporter, LiveReporter, QuietReporter
from dpbam.app.runs import Budget, RunConfig, RunInterruptedError, RunResult, execute, prepare
from dpbam.app.runs.automatic import best_change, expectation, with_default_model
from dpbam.app.runs.folder import PUBLISHABLE, RunFolder
from dpbam.app.runs.preparation import duration
from dpbam.app.runs.spending import preview
from dpbam.app.runs.statement import released_files
from dpbam.distributed import Ranks, joined, launched
from dpbam.errors import ArgumentError
from dpbam.privacy.rounding import down, up
from dpbam.tasks.scores import explain_no_gain, metric_label, metric_text
from dpbam.training.events import Reporter


@settings_as_flags()
def train(
    flags: dict[str, object],
    config: ConfigFile = None,
    out: Annotated[Path | None, option("The run folder. By default a new one in runs/.")] = None,
    resume: Annotated[bool, option("Resume the run in --out.", "--resume")] = False,
    dry_run: Annotated[
        bool, option("Print the plan: sigma, steps, epsilon, memory, time.", "--dry-run")
    ] = False,
    quiet: Annotated[bool, option("One line, at the end.", "--quiet", "-q", common=False)] = False,
    json_lines: Annotated[
        bool,
        option(
            "JSON on stdout, an event per line, for scripts. A scheduler keeps it, so warnings "
            "about the data are in the run's non-private/warnings.txt instead.",
            "--json-lines",
            common=False,
        ),
    ] = False,
) -> None:
    """Train a model with differential privacy, and write a privacy statement.

    Give a data set and a budget (--epsilon): model and settings that you leave out are chosen from
    public facts alone, so that nothing needs tuning (--model auto). The run folder then holds the
    model, its metrics and the statement. Ctrl-C saves; --resume continues.

    Examples:
        $ dpbam train --data digits --epsilon 3 --out runs/digits
        $ dpbam train --data ./scans --epsilon 3 --encoder onnx:public.onnx --out runs/scans
        $ dpbam train --data cifar10 --model resnet9 --model-option width=0.25 --method bam
            --epsilon 8 --batch-size 4096 --augment-multiplicity 4 --out runs/cifar
        $ dpbam train --data ./scans --image-size 64 --unit patient --epsilon 8 --dry-run
        $ dpbam train --config run.toml --lr 0.002 --out runs/second
        $ dpbam train --resume --out runs/second
        $ torchrun --nproc-per-node 2 -m dpbam train --config run.toml --out runs/third
    """
    with joined() as ranks:
        settings, folder, going_on = ranks.from_leader(lambda: _asked(config, flags, out, resume))
        if not ranks.leads:
            warnings.simplefilter("ignore", UserWarning)  # the leader gives them
        elif dry_run:
            _show_plan(settings, RunFolder(folder) if going_on else None, json_lines)
        if dry_run:
            return
        result = _execute(settings, folder, going_on, _reporting(ranks, quiet, json_lines), ranks)
    if result is None:
        raise typer.Exit(INTERRUPTED)
    if ranks.leads:
        _show_result(result, settings, quiet, json_lines)


def _show_result(result: RunResult, settings: RunConfig, quiet: bool, json_lines: bool) -> None:
    if result.evaluations[-1].useless is not False:
        note(f"warning: {_explain_no_gain(result, settings)}")
    if json_lines:
        print_json({"event": "end", **_end(result)})
    elif quiet:
        spent = up(result.epsilon)
        value = metric_text(result.metric, result.score)
        say(f"{metric_label(result.metric)} {value}, epsilon {spent}: {result.out}")
        if result.status != "complete":
            note(result.ending)
    else:
        say(facts(_summary(result, settings)))


def _asked(
    config: Path | None, flags: dict[str, object], out: Path | None, resume: bool
) -> tuple[RunConfig, Path, bool]:
    """Return settings, folder, and whether to resume: also when torchrun restarts the process."""
    if out is None and launched():
        raise ArgumentError("several processes need --out, so that they can be restarted")
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts and out is not None and RunFolder(out).started:
        config, resume = None, True
    settings = _settings(config, flags, out, resume)
    return settings, out or _new_folder(settings), resume


def _settings(
    config: Path | None, flags: dict[str, object], out: Path | None, resume: bool
) -> RunConfig:
    if not resume:
        return run_config(config, flags, default=with_default_model)
    if out is None:
        raise ArgumentError("--resume needs --out, the folder of the run")
    if config is not None:
        raise ArgumentError("--resume takes the run's own configuration: leave --config out")
    return resumed_config(out, flags)


def _reporting(
    ranks: Ranks, quiet: bool, json_lines: bool
) -> AbstractContextManager[Reporter | None]:
    """Return what shows the progress; of several processes, only the leader's does."""
    if not ranks.leads:
        return nullcontext(None)
    if json_lines:
        return nullcontext(JsonLinesReporter())
    return nullcontext(QuietReporter()) if quiet else LiveReporter()


def _execute(
    settings: RunConfig,
    folder: Path,
    resume: bool,
    reporting: AbstractContextManager[Reporter | None],
    ranks: Ranks,
) -> RunResult | None:
    """Return the result; None if the run was stopped, and saved."""
    try:
        with reporting as reporter:
            return execute(settings, folder, resume=resume, reporter=reporter, ranks=ranks)
    except RunInterruptedError as stop:
        if ranks.leads:
            note(str(stop))
        return None


def _show_plan(settings: RunConfig, resumed: RunFolder | None, as_json: bool) -> None:
    from dpbam.bias import method_advice  # torch

    with console(stderr=True).status("loading PyTorch") as status:
        prepared = prepare(settings, on_phase=status.update)
        status.update("reading the images")
        defects = prepared.defects()
        run = "" if resumed is None else resumed.read_facts().run
        summary = asdict(prepared.summary(status.update))
        if settings.budget is not None:
            summary |= asdict(preview(settings.budget, run, prepared.plan))
    config, plan = prepared.config, prepared.plan
    classes = prepared.train.num_classes
    expected = expectation(config, plan.n, classes, prepared.task.name)
    change = best_change(config, plan.n, classes)
    if as_json:
        summary |= {"expected_level": expected, "gains_most": change}
        print_json(summary | ({"chosen": list(prepared.chosen)} if prepared.chosen else {}))
        return
    memory = summary.pop("estimated_memory_bytes") / 2**20
    seconds = summary.pop("estimated_seconds")
    rows = {name.replace("_", " "): value for name, value in summary.items()}
    if settings.physical_batch_size is None:
        rows["physical batch size"] = f"about {summary['physical_batch_size']}, chosen to fit"
    rows["evaluation"] = prepared.evaluated_on
    rows["estimated memory"] = f"{memory:.0f} MiB"
    rows["estimated time"] = (
        f"about {duration(seconds)} on this machine, as steps on blank images take; reading files "
        "may add to it"
    )
    rows["expected level"] = expected
    if change:
        rows["gains most"] = change
    say(facts(rows, title="the plan (nothing was trained or written)"))
    for warning in defects:
        warn(warning)
    say(*prepared.chosen)
    if not prepared.config.in_closed_form:
        say(*filter(None, [method_advice(settings.method, averaged=prepared.config.averaged)]))


def _new_folder(settings: RunConfig) -> Path:
    name = re.sub(r"[^\w.-]+", "-", f"{Path(settings.data).name or 'run'}-{settings.method}").strip(
        "-."
    )
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{name}-{now}"


def _explain_no_gain(result: RunResult, settings: RunConfig) -> str:
    """Say that the model has learned nothing or that this is not known, and what to try."""
    last = result.evaluations[-1]
    if last.useless is None:
        return f"{explain_no_gain(last.compared)}. Next: evaluate it on more records"
    encoder = "" if settings.encoder else ", a public encoder (--encoder hf:NAME)"
    private = f"a larger --epsilon or --batch-size, more --epochs{encoder}, or more data"
    way = private if settings.private else "more --epochs"
    return (
        f"{explain_no_gain(last.compared)}. Next: check the labels with "
        f"dpbam data check, then try another --lr, {way}"
    )


def _end(result: RunResult) -> dict[str, object]:
    last = result.evaluations[-1]
    return {
        "status": result.status,
        **last.scores,
        **{name: one.score for name, one in last.compared.items()},
        "best_constant": {name: one.constant for name, one in last.compared.items()},
        "useless": last.useless,
        "epsilon": result.epsilon,
        "delta": result.delta,
        "steps": result.steps,
        "out": str(result.out),
    }


def _budget(path: Path) -> str:
    """Say what of a data set's budget is left: about, since epsilons do not just add up."""
    budget = Budget(path)
    (epsilon, delta), taken = budget.total, budget.epsilon()
    return (
        f"epsilon {up(taken)} of {up(epsilon)} is taken at delta {number(delta)}, about "
        f"{down(max(0.0, epsilon - taken))} is left ({path})"
    )


def _summary(result: RunResult, settings: RunConfig) -> dict[str, object]:
    last = result.evaluations[-1]
    rows: dict[str, object] = {
        "status": "complete" if result.status == "complete" else result.ending,
        **{metric_label(name): metric_text(name, value) for name, value in last.scores.items()},
    }
    rows[metric_label(last.metric)] = (
        f"{metric_text(last.metric, last.score)} of {last.records} test records"
    )
    for name, one in last.compared.items():
        rows.setdefault(metric_label(name), metric_text(name, one.score))
    rows["best constant"] = ", ".join(
        f"{metric_label(name)} {metric_text(name, one.constant)}"
        for name, one in last.compared.items()
    )
    if settings.private:
        budget = f" of {up(settings.epsilon)}" if settings.epsilon else ""
        rows["epsilon"] = f"{up(result.epsilon)}{budget} at delta {number(result.delta)}"
        if settings.budget is not None:
            rows["data set's budget"] = _budget(settings.budget)
    else:
        rows["epsilon"] = "infinite: this is a reference without privacy, not to be published"
    rows["folder"] = result.out
    if settings.private:
        files = ", ".join([*PUBLISHABLE, *released_files(result.spec.config)])
        if settings.seed is not None:
            files = f"of sensitive data nothing, since the run is seeded; of other data: {files}"
        rows["publish"] = files
        rows["keep"] = "everything else, above all non-private/, is for the operator only"
        rows["note"] = (
            f"{metric_label(last.metric)} on held-out records is a release of its own, unless they "
            "are public"
        )
    return rows
