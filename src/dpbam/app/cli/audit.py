"""``dpbam audit``: check a finished run, or attack its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpbam.app.cli.output import Json, facts, number, option, print_json, say, table
from dpbam.privacy.rounding import down, up

if TYPE_CHECKING:
    from dpbam.app.audit import MembershipResult
    from dpbam.app.audit.membership import Rate
    from dpbam.app.audit.stated import Finding


def audit(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A finished run, or an exported model."),
    ],
    attack: Annotated[bool, option("Attack RUN's released model.", "--attack")] = False,
    shadows: Annotated[int, option("Shadow models of that attack; 0: none.")] = 16,
    own_code: Annotated[
        bool, option("Call the functions that RUN names as its data or model.", "--own-code")
    ] = False,
    confidence: Annotated[float, option("Of all limits of that attack together.")] = 0.95,
    jobs: Annotated[int, option("Processes of that attack.")] = 1,
    out: Annotated[Path | None, option("Folder of that attack's files [RUN/non-private].")] = None,
    public_key: Annotated[
        Path | None, option("Of RUN's operator (PEM): the statement must be signed with it.")
    ] = None,
    every: Annotated[
        bool, option("List every check of RUN, also those that are right.", "--all")
    ] = False,
    json: Json = False,
) -> None:
    """Check a finished run, or attack its model.

    Epsilon is computed again from the ledger by a second accountant, and configuration, ledger,
    statement, checkpoint and model are checked against one another, buffers and frozen parameters
    against their record from before training, files against their digests, and the operator's
    signature if there is one; exit code 1 if anything is wrong. What is wrong is listed, --all
    lists the rest too. The verdict says what it means, and what it does not. The folder of an
    exported model is checked likewise, against its list of digests.

    With --attack: an attacker who has the released model decides of each training and test record
    whether it was trained on, by its loss and its gradient, with shadow models and without. The
    true positive rates, with confidence limits, are put next to the best that the run's mechanism
    allows; exit code 1 if one is above it. The files are for the operator only.

    Examples:
        $ dpbam audit runs/digits
        $ dpbam audit runs/digits --attack --jobs 2
        $ dpbam audit runs/digits --public-key operator-public.pem
    """
    if attack:
        _membership(folder, shadows, confidence, jobs, out, own_code, as_json=json)
    else:
        _check(folder, public_key, json, every)


def _check(folder: Path, operator: Path | None, as_json: bool, every: bool) -> None:
    from dpbam.app.audit.check import audit, passed

    findings, means, does_not_mean = audit(folder, operator)
    good = passed(findings)
    if as_json:
        meaning = {"means": means, "does_not_mean": does_not_mean} if good else {}
        rows = [{"check": f.check, "state": f.state, "seen": f.seen} for f in findings]
        print_json({"passed": good, **meaning, "findings": rows})
    else:
        wrong = sum(not f.right for f in findings)
        _show_findings(folder, findings, every)
        if good:
            say(f"passed. This means that {means}.")
            say(f"It does not mean {does_not_mean}.")
        else:
            say(f"not passed: {wrong} checks failed. Do not rely on the statement until each "
                "is explained: a changed or lost file looks the same as a forged one.")  # fmt: skip
    if not good:
        raise typer.Exit(1)


def _show_findings(folder: Path, findings: list[Finding], every: bool) -> None:
    """List what is wrong and, if asked for, what is right; name what could not be checked."""
    states = ("wrong", "right") if every else ("wrong",)
    shown = [f for state in states for f in findings if f.state == state]
    rows = [(f.state.upper() if f.state == "wrong" else f.state, f.check, f.seen) for f in shown]
    if rows:
        say(table(("", "check", "seen"), rows, title=f"audit of {folder}", left=3))
    right = sum(f.state == "right" for f in findings)
    rest = "" if every else ": --all lists them"
    skipped = [f.seen for f in findings if f.state == "not checked"]
    say(f"{right} of {len(findings) - len(skipped)} checks of {folder} are right{rest}.")
    for seen in skipped:
        say(f"{seen[0].upper()}{seen[1:]}.")


def _membership(
    folder: Path, shadows: int, confidence: float, jobs: int, out: Path | None,
    own_code: bool, *, as_json: bool,
) -> None:  # fmt: skip
    from dpbam.app.audit import attack_run
    from dpbam.app.audit.membership import save_roc
    from dpbam.app.cli.progress import counting
    from dpbam.app.runs.files import write_json

    with counting("shadow models", shadows, quiet=as_json) as update:
        result = attack_run(
            folder, shadows=shadows, confidence=confidence, jobs=jobs, own_code=own_code,
            progress=update,
        )  # fmt: skip
    place = out or folder / "non-private"
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / "attack.json", result.to_dict())
    save_roc([result], place / "attack.png")
    if as_json:
        print_json(result.to_dict())
    else:
        _show_membership(result, place)
    if result.violated:
        raise typer.Exit(1)


def _show_membership(result: MembershipResult, place: Path) -> None:
    rows = [
        (attack.name, f"{rate.level:.1%}", *_limits(rate), f"{up(100 * rate.best_possible, 3)}%")
        for attack in result.attacks
        for rate in result.rates(attack)
    ]
    header = ("attack", "false positives at most", "members found", "at least", "best possible")
    title = f"attack on the model of {result.run}; not protected by privacy: do not share"
    say(table(header, rows, title=title))
    one = result.attacks[0]
    say(facts({
        "records": f"{len(one.members)} members, {len(one.others)} non-members",
        "epsilon": f"{up(result.epsilon)} at delta {number(result.delta)}",
        "confidence": f"{result.confidence:g}, of all lower limits together",
        "verdict": result.verdict,
        "files": f"{place / 'attack.json'}, {place / 'attack.png'}; for the operator only",
    }))  # fmt: skip


def _limits(rate: Rate) -> tuple[str, str]:
    """Too few non-members cannot show that false positives are that rare."""
    if rate.false_positives is None:
        return "too few records", "-"
    return f"{rate.seen:.1%}", f"{down(100 * rate.least, 3)}%"
