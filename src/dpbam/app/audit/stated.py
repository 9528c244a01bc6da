"""What a run folder holds, as an audit reads it; and the checks of its statement's words.

Each word is computed again from the run's other files. Settings determine most of them; the rest
are in the run's facts, its log of evaluations and the budget's file. What only the statement has is
not checked: the day on which it was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dpbam._version import __version__
from dpbam.app.runs.budget import Budget, by_kind
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.documents import RunFacts, Settled, Statement
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.identity import signed_files, today, verified
from dpbam.app.runs.run import RunError
from dpbam.app.runs.statement import evaluated_on
from dpbam.app.runs.statement_check import fields_unlike_the_settings, text_agreement
from dpbam.errors import ArgumentError
from dpbam.privacy.accounting import Charge, total_epsilon
from dpbam.privacy.ledger import BEFORE


class Finding(NamedTuple):
    """One check: what was asked, whether it is right, and what was seen.

    Attributes:
        skipped: nothing is wrong, but there was nothing to check, such as no signature.
    """

    check: str
    right: bool
    seen: str
    skipped: bool = False

    @property
    def state(self) -> str:
        """What to show: "right", "wrong" or "not checked"."""
        if not self.right:
            return "wrong"
        return "not checked" if self.skipped else "right"


def _composable(sigma: float) -> float:
    if sigma and not 1e-6 <= sigma <= 1e9:
        raise ArgumentError("an accountant needs 0, or a number from 1e-6 to 1e9")
    return sigma


def digits(*values: float) -> str:
    """Return numbers with six significant digits; with all where six would hide a difference.

    Example:
        >>> digits(1.4400783973845355, 1.4400783973845355), digits(1.0, 1.0000001)
        ('1.44008', '1.0; 1.0000001')
    """
    short = [f"{value:.6g}" for value in values]
    if len({*values}) > len({*short}):
        return "; ".join(map(repr, values))
    return "; ".join(dict.fromkeys(short))


class Release(BaseModel):
    """One entry of a ledger, read apart from the ledger's own code; other fields are left alone."""

    model_config = ConfigDict(frozen=True, strict=True)

    stream: str
    step: Annotated[int, Field(ge=0)]
    noise_multiplier: Annotated[float, AfterValidator(_composable)]
    sampling_rate: Annotated[float, Field(gt=0, le=1)]

    @property
    def is_step(self) -> bool:
        """Whether it is a step, and not a release before the first."""
        return not self.stream.endswith(BEFORE)


class Evidence(NamedTuple):
    """What the folder holds."""

    folder: RunFolder
    facts: RunFacts
    config: RunConfig
    releases: list[Release]
    torn: bool
    statement: Statement
    operator_key: str | None = None  # the public key that is expected

    @property
    def charges(self) -> list[Charge]:
        """The ledger's steps, equal ones together."""
        counts = Counter((one.noise_multiplier, one.sampling_rate) for one in self.releases)
        return [Charge(sigma, q, k) for (sigma, q), k in sorted(counts.items())]

    @property
    def steps(self) -> list[Release]:
        """The steps, without releases before the first."""
        return [one for one in self.releases if one.is_step]


def _settings(e: Evidence) -> Iterator[Finding]:
    words, facts = e.statement, e.facts
    yield Finding("the statement is this run's", words.run == facts.run, str(words.run))
    day = str(words.identity.date)
    yield Finding("the statement's date is not in the future", day <= today(), day)
    odd = fields_unlike_the_settings(e.folder, words, e.config, facts)
    seen = ", ".join(odd) or f"{len(Settled.model_fields)} fields"
    if odd and words.dpbam != __version__:
        seen += f"; it was written by dpbam {words.dpbam}: audit it with that version"
    yield Finding("the statement's words follow from the settings", not odd, seen)


def _evaluations(e: Evidence) -> Iterator[Finding]:
    what = "the statement's evaluations are the run's"
    times = e.folder.count_evaluations(seeded=e.config.seed is not None)
    stated = e.statement.evaluated_on
    expected = evaluated_on(e.config, str(e.facts.unit), e.facts.test, times)
    odd = sorted(k for k, v in dict(expected).items() if getattr(stated, k) != v)
    yield Finding(what, not odd, ", ".join(odd) or f"{times} times")


def _budget(e: Evidence) -> Iterator[Finding]:
    """The budget that the run was given is the one that is stated, and counts the run."""
    path, stated = e.config.budget, e.statement.budget
    same = (path and path.name) == (stated and stated.file)
    yield Finding("the statement names the run's budget", same, str(path or "no budget"))
    if path is None or stated is None or not same:
        return
    what = "the budget counts this run as its ledger does"
    if not path.is_file():
        seen = f"the budget's file is not on this machine, so it was not compared: {path}"
        yield Finding(what, True, seen, skipped=True)
        return
    try:
        budget = Budget(path)
        entries, total = budget.entries(), budget.total
    except RunError as error:
        yield Finding(what, False, str(error))
        return
    mine = [entry for entry in entries if entry.run == e.facts.run]
    counted = [by_kind(entry.charges) for entry in mine]
    seen = f"{sum(c.total() for c in counted)} releases; {len(e.releases)} on the ledger"
    yield Finding(what, counted == [by_kind(e.charges)], seen)
    yield Finding("the statement's budget is the file's",
                  total == (stated.epsilon, stated.delta),
                  f"epsilon {total[0]:g} at delta {total[1]:g}")  # fmt: skip
    least = total_epsilon(e.charges, total[1], accountant="pld")  # the least of all
    unknown = {r.run for r in stated.other_runs} - {entry.run for entry in entries}
    yield Finding("what the budget had given by then holds this run",
                  stated.taken >= least * (1 - 1e-6) and not unknown,
                  f"{digits(stated.taken)}; at least {digits(least)}")  # fmt: skip


def _texts(e: Evidence) -> Iterator[Finding]:
    yield from texts(e.folder, e.statement)


def texts(folder: RunFolder, statement: Statement) -> Iterator[Finding]:
    """Check that the Markdown and HTML files have the content of the JSON file."""
    checks = (
        "the statement for people is the one for machines",
        "the statement to print is the one for people",
        "the model card promises what the statement does",
    )
    for check, (path, agrees) in zip(
        checks, text_agreement(folder, statement).items(), strict=True
    ):
        yield Finding(check, agrees, path.name)


SIGNATURE = (
    "the statement is signed", "the signature is the statement's",
    "the signature is the operator's",
)  # fmt: skip


def signature(folder: RunFolder, operator: str | None) -> Iterator[Finding]:
    """The operator's key, if one is expected, signed what is in the folder.

    Without a key and a signature there is nothing to check: the verdict says what a signature adds.
    """
    if not signed_files(folder)[1].exists():
        if operator is not None:
            seen = "not signed: who vouches for the statement is not known"
            yield Finding(SIGNATURE[0], False, seen)
        return
    try:
        key = verified(folder)
    except RunError as error:
        yield Finding(SIGNATURE[1], False, str(error))
        return
    note = "" if operator else "; compare the key with the one that the operator published"
    yield Finding(SIGNATURE[1], True, f"by the owner of key {key}{note}")
    if operator is not None:
        yield Finding(SIGNATURE[2], key == operator, operator)


STATED = (_settings, _evaluations, _budget, _texts)
