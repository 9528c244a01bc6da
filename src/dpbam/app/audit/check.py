"""``dpbam audit RUN``: is a run folder consistent with itself, and with a second accountant?

Or the folder of an exported model: are its files the ones that were exported, and signed? Reads
only; repairs nothing. Every check yields findings, right or wrong, in words. ``dpbam sign`` signs
what passes every check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pydantic import ValidationError

from dpbam.app.audit.accountant import bracket, profile
from dpbam.app.audit.stated import (
    SIGNATURE,
    STATED,
    Evidence,
    Finding,
    Release,
    digits,
    signature,
    texts,
)
from dpbam.app.runs.automatic import not_by_rule
from dpbam.app.runs.config import RunConfig, read_file
from dpbam.app.runs.documents import (
    Attacks,
    DamagedFileError,
    Exported,
    FeatureCentre,
    Statement,
    first_problem,
)
from dpbam.app.runs.facts import difference
from dpbam.app.runs.folder import PUBLISHABLE, RunFolder
from dpbam.app.runs.identity import (
    EXPORTED,
    config_digest,
    exported_files,
    file_digest,
    is_export,
    public_key,
    write_signature,
)
from dpbam.app.runs.run import RunError
from dpbam.app.runs.statement import RATES, attacks, released_files
from dpbam.app.runs.statement_check import MOST_KINDS
from dpbam.privacy.accounting import total_epsilon
from dpbam.privacy.rounding import down, up
from dpbam.privacy.tradeoff import TradeOff

if TYPE_CHECKING:
    from torch import Tensor

    from dpbam.training.trainer import TrainerState

_MOST_LEDGER = 2**30  # bytes
MEANS = (
    "the files of the run agree with one another: the model is the one that the statement names; "
    "every step that reached it is on the ledger; a second accountant, written apart, finds the "
    "stated epsilon and attacks within its bounds for these steps; nothing but trained parameters "
    "was changed by training; the statement's words follow from the settings, and its evaluations "
    "and budget are those on record; and only files that may be published are listed as such"
)
DOES_NOT_MEAN = (
    "that the program did what the ledger records (for that there is make prove); that the "
    "records of one owner were really named as one; that the operator published nothing else "
    "from this data, or tuned on none of it; that the files are genuine (an operator who made up "
    "all of them consistently would pass: a signature says who vouches); or that the "
    "epsilon is small enough for the purpose"
)
EXPORT_MEANS = (
    "the folder's files are those that exported.json lists, no more and no less; the privacy "
    "statement among them is about the model that was exported, and lets it be published"
)
EXPORT_DOES_NOT_MEAN = (
    "that the statement is true (for that, audit the run's folder); that the exported file "
    "computes what the run's model does (dpbam export compares their predictions); or, "
    "without a signature and the operator's public key, that the list of files is the operator's"
)


class Audit(NamedTuple):
    """What the checks of a folder found, and what it means if all of it is right."""

    findings: list[Finding]
    means: str
    does_not_mean: str


def audit(folder: str | Path, operator: Path | None = None) -> Audit:
    """Check a run folder, or the folder of an exported model.

    Args:
        folder: of either kind.
        operator: the operator's public key (PEM), with which it must then be signed.

    Raises:
        RunError: if there is neither, or a file cannot be read.
    """
    if is_export(RunFolder(folder)):
        findings = check_export(folder, operator)
        return Audit(findings, EXPORT_MEANS, EXPORT_DOES_NOT_MEAN)
    return Audit(check_run(folder, operator), MEANS, DOES_NOT_MEAN)


def sign(folder: str | Path, key: Path) -> str:
    """Sign the statement of a run, or the digests of an export, and return the public key.

    What is signed passes every check of :func:`audit`; an older signature is replaced.

    Raises:
        RunError: if a check fails, or a file is missing; nothing is written then.
        ArgumentError: if there is no such key, or no package for it.
    """
    run = RunFolder(folder)
    findings = [f for f in audit(run.path).findings if f.check not in SIGNATURE]
    wrong = [finding for finding in findings if not finding.right]
    if wrong:
        more = f", and {len(wrong) - 1} other checks fail" if len(wrong) > 1 else ""
        raise RunError(
            f"nothing was signed: in {run.path} it does not hold that {wrong[0].check} "
            f"({wrong[0].seen}){more}; see dpbam audit {run.path}"
        )
    return write_signature(run, key)


def check_run(run: str | Path, operator: Path | None = None) -> list[Finding]:
    """Every finding about a run folder; arguments and errors are those of :func:`audit`."""
    folder = RunFolder(run)
    for path in (folder.facts, folder.ledger, folder.statement_json, folder.config):
        if not path.is_file():
            raise RunError(f"{path} is missing: an audit needs the folder of a finished run")
    strangers = list(folder.strangers())
    if strangers:
        return [Finding("no link leads out of the folder, all files are plain", False,
                        strangers[0])]  # fmt: skip
    facts = folder.read_facts()
    config = RunConfig.from_mapping(read_file(folder.config))
    releases, torn = _read_ledger(folder.ledger)
    try:
        statement = Statement.read(folder.statement_json)
    except DamagedFileError as error:
        return [Finding("the statement has the fields of a statement", False, str(error))]
    evidence = Evidence(
        folder, facts, config, releases, torn, statement,
        None if operator is None else public_key(operator),
    )  # fmt: skip
    if len(evidence.charges) > MOST_KINDS:  # each takes an accountant seconds
        seen = f"{len(evidence.charges)} on the ledger"
        return [Finding("a run has few kinds of steps (sigma, q)", False, seen)]
    return [finding for check in _CHECKS for finding in _checked(check, evidence)]


def passed(findings: list[Finding]) -> bool:
    """Whether nothing is wrong."""
    return all(f.right for f in findings)


def _checked(
    check: Callable[[Evidence], Iterator[Finding]], evidence: Evidence
) -> Iterator[Finding]:
    """The findings of a check; a file without the field that it asks for is a finding, too."""
    try:
        yield from check(evidence)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        name = check.__name__.strip("_").replace("_", " ")
        yield Finding(name, False, f"a field is missing or of the wrong kind: {error}")


def _epsilon(e: Evidence) -> Iterator[Finding]:
    stated, delta = e.statement.epsilon, float(e.statement.delta)
    first = total_epsilon(e.charges, delta, accountant=e.config.accountant)
    seen = "; ".join(dict.fromkeys([up(stated, 7), up(first, 7)]))
    yield _same("the statement's epsilon is the ledger's", stated, first)._replace(seen=seen)
    low, high = bracket(e.charges, delta)
    yield Finding(
        "a second accountant agrees",
        stated >= low * (1 - 1e-6),
        f"stated {up(stated, 7)}; second accountant: between {down(low, 7)} and {up(high, 7)}; "
        f"by Renyi divergences {up(total_epsilon(e.charges, delta, accountant='rdp'), 7)}",
    )
    if e.config.epsilon is not None:
        seen = f"{up(stated, 7)} of {up(e.config.epsilon, 7)}"
        yield Finding("epsilon is within its target", stated <= e.config.epsilon, seen)


def _trade_off(e: Evidence) -> Iterator[Finding]:
    stated, first = e.statement.trade_off, attacks(e.charges, e.config.accountant)
    seen = f"mu {stated.gaussian_mu if isinstance(stated, Attacks) else 'not given'}"
    yield Finding("the statement's attacks are the ledger's", stated == first, seen)
    if not isinstance(stated, Attacks) or not e.charges:
        return
    epsilons = np.linspace(0.0, 1.5 * e.statement.epsilon + 1, 2000)
    low, _ = profile(e.charges, epsilons, float(e.statement.delta))
    second = TradeOff(epsilons[low > 1e-9], low[low > 1e-9])
    pairs = [(rate, stated.true_positive_rates[f"{rate:g}"], second.power(rate))
             for rate in RATES]  # fmt: skip
    yield Finding(
        "a second accountant finds no better attack",
        all(claim >= other - 1e-5 for _, claim, other in pairs),
        "; ".join(f"at {rate:g}: stated {claim:.4g}, second {other:.4g}"
                  for rate, claim, other in pairs),
    )  # fmt: skip


def _identity(e: Evidence) -> Iterator[Finding]:
    """The files are those that the statement names, and the operator's key signed it."""
    files = e.statement.identity.files
    released = {n for n in released_files(e.config) if (e.folder.path / n).exists()}
    needed = {e.folder.weights.name, e.folder.model.name, *released}
    yield Finding("the statement names the model's files and what was released",
                  needed <= {*files}, ", ".join(sorted(needed - {*files})) or "all")  # fmt: skip
    for name, digest in files.items():
        path = e.folder.path / Path(name).name
        same = path.is_file() and file_digest(path) == digest
        yield Finding(f"{path.name} is the file that the statement names", same, digest)
    digest = e.statement.identity.configuration_sha256
    yield Finding("the configuration is the one that the statement names",
                  digest == config_digest(e.config), digest)  # fmt: skip
    yield from signature(e.folder, e.operator_key)


def _ledger(e: Evidence) -> Iterator[Finding]:
    yield Finding("the ledger ends in a whole line", not e.torn, e.folder.ledger.name)
    keys = Counter((one.stream, one.step) for one in e.releases)
    twice = [key for key, count in keys.items() if count > 1]
    yield Finding("no noise is used twice", not twice, f"{len(twice)} steps of a stream repeat")
    steps = {one.step for one in e.steps}
    taken = int(e.statement.steps)
    missing = taken - sum(0 <= step < taken for step in steps)  # no list of them: it may be long
    yield Finding("every step is on the ledger", not missing, f"{missing} are missing")
    seeds = {one.stream.startswith("seed-") for one in e.releases}
    yield Finding(
        "the ledger's streams are seeded as the statement says",
        seeds <= {bool(e.statement.seeded)}, f"seeded: {e.statement.seeded}",
    )  # fmt: skip


def _mechanism(e: Evidence) -> Iterator[Finding]:
    s, f, private = e.statement, e.facts, e.config.private
    rate = e.config.expected_batch(int(f.n)) / int(f.n)
    sigmas = {one.noise_multiplier for one in e.steps}
    before = [(one.noise_multiplier, one.sampling_rate) for one in e.releases if not one.is_step]
    sigma = e.config.released_before
    paid = [] if sigma is None else [(sigma, 1.0)]
    yield Finding("what is released before the first step is charged once, at q = 1",
                  before == paid, f"{len(before)} charged, {len(paid)} released")  # fmt: skip
    expected = _charged(float(f.noise_multiplier), e.config.joint_noise_multipliers)
    yield Finding(
        "the ledger's sigma is the run's",
        all(math.isclose(x, expected, rel_tol=1e-9) for x in sigmas),
        digits(*sorted(sigmas), expected),
    )
    yield _same("the statement's charged sigma is the ledger's",
                s.charged_noise_multiplier, expected)  # fmt: skip
    rates = {one.sampling_rate for one in e.steps}
    yield Finding("the ledger's q is batch size / n", rates <= {rate}, digits(*sorted(rates), rate))
    yield _same("the statement's sigma is the run's", s.noise_multiplier,
                float(f.noise_multiplier))  # fmt: skip
    yield _same("the statement's q is batch size / n", float(s.sampling_rate), rate)
    yield _same("the statement's n is the run's", float(s.units), float(f.n))
    yield _same("the statement's delta is the run's", float(s.delta), float(f.delta))
    yield Finding("all charged steps are stated", int(s.charged_steps) == len(e.steps),
                  f"{s.charged_steps} stated, {len(e.steps)} on the ledger")  # fmt: skip
    if private:
        yield _same("the statement's C is the configured one", s.clip_norm,
                    e.config.clip_norm)  # fmt: skip
    seeded = e.config.seed is not None
    yield Finding("seeding is stated", bool(s.seeded) == seeded, f"seeded: {seeded}")


def _configuration(e: Evidence) -> Iterator[Finding]:
    began = e.facts.config
    before, now = began.to_mapping(), e.config.to_mapping()
    before["delta"] = float(e.facts.delta)
    before.setdefault("unit", e.facts.unit)  # the data set's own
    before.setdefault("batch_size", began.expected_batch(int(e.facts.n)))
    names = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
    yield Finding("config.toml is what the run began with", not names, ", ".join(names) or "same")


def _rule(e: Evidence) -> Iterator[Finding]:
    """Apply the rule again that is stated to have chosen settings."""
    if e.config.auto_facts or e.config.auto_settings:
        reason, names = not_by_rule(e.config), ", ".join(e.config.auto_settings)
        yield Finding("settings stated as chosen by a rule are the rule's", not reason,
                      reason or names)  # fmt: skip


def _checkpoints(e: Evidence) -> Iterator[Finding]:
    from dpbam.app.runs import checkpoint

    if not checkpoint.listed(e.folder.checkpoints):
        yield Finding("a checkpoint is there", False, "none")
        return
    try:
        latest = checkpoint.load_latest(e.folder.checkpoints, str(e.facts.run))
    except RunError as error:
        yield Finding("the checkpoint is whole and of this run", False, str(error))
        return
    assert latest is not None
    step = int(latest["oracle"]["step"])
    yield Finding("the checkpoint is whole and of this run", True, f"step {step}")
    yield Finding("the ledger covers the checkpoint", step <= len(e.steps),
                  f"step {step}, {len(e.steps)} charged")  # fmt: skip
    yield Finding("the statement's steps are the checkpoint's", step == int(e.statement.steps),
                  f"{step}; {e.statement.steps}")  # fmt: skip
    yield _model(e, latest)


def _fixed(e: Evidence) -> Iterator[Finding]:
    """Buffers and frozen parameters are published as they were before the model saw data."""
    what = "what is published besides trained parameters is as before training"
    weights = _weights(e)
    if isinstance(weights, str):
        yield Finding(what, False, weights)
        return
    recorded = e.facts.initial_tensors
    wrong = difference(weights, recorded)
    yield Finding(what, not wrong, wrong or f"{len(recorded.fixed)} tensors, bit-identical")


def _weights(e: Evidence) -> dict[str, Tensor] | str:
    """The published tensors, or why they cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(e.folder.weights)
    except (OSError, SafetensorError) as error:
        return str(error)


def _model(e: Evidence, state: TrainerState) -> Finding:
    """The published weights are those of the last checkpoint (its average, if it has one)."""
    import torch

    what = "the model handed out is the checkpoint's"
    weights = _weights(e)
    if isinstance(weights, str):
        return Finding(what, False, weights)
    expected = {**state["model"], **(state["average"] or {})}
    odd = [
        k for k in {*weights, *expected}
        if k not in weights or k not in expected or not torch.equal(weights[k], expected[k])
    ]  # fmt: skip
    return Finding(what, not odd, f"{len(odd)} of {len(expected)} tensors differ")


def _centre(e: Evidence) -> Iterator[Finding]:
    """A centre of features came from the release that is charged, and from nothing else."""
    import torch

    from dpbam.app.runs.first_release import shrunk

    if e.config.release_centre is None:
        return
    what, weights = "the model's centre is the one that was released", _weights(e)
    if isinstance(weights, str) or "centre" not in weights or not e.folder.centre.exists():
        yield Finding(what, False, "a file or the centre is missing")
        return
    stored = FeatureCentre.read(e.folder.centre)
    noise = e.config.release_centre / int(e.facts.n)
    expected = torch.from_numpy(shrunk(np.array(stored.mean), noise)).float()
    same = torch.equal(expected, weights["centre"].float())
    yield Finding(what, same and stored.noise == noise, f"noise {noise:.3g} per coordinate")


def _published(e: Evidence) -> Iterator[Finding]:
    paid = set(released_files(e.config))
    allowed, listed = {*PUBLISHABLE, *paid}, set(e.statement.may_be_published)
    yield Finding("only harmless files are listed for publishing", listed <= allowed,
                  ", ".join(sorted(listed)))  # fmt: skip
    yield Finding("statistics are released only where they are paid for",
                  not any(path.exists() and path.name not in paid for path in
                          (e.folder.statistics, e.folder.class_counts, e.folder.centre)),
                  ", ".join(sorted(paid)) or "none")  # fmt: skip
    there = [e.folder.path / name for name in sorted(allowed)]
    marked = [p.name for p in there if p.is_file() and b"non_private" in p.read_bytes()]
    yield Finding("nothing unprotected is in them", not marked, ", ".join(marked) or "nothing")


_CHECKS = (
    _epsilon, _trade_off, _ledger, _mechanism, _configuration, _rule, _checkpoints, _fixed,
    _centre, _published, _identity, *STATED,
)  # fmt: skip


def _read_ledger(path: Path) -> tuple[list[Release], bool]:
    """All entries, and whether the last line is torn; read here, not by the ledger's own code."""
    if path.stat().st_size > _MOST_LEDGER:
        raise RunError(f"{path} is too large for a ledger")
    raw = path.read_bytes()
    releases = []
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            releases.append(Release.model_validate_json(line))
        except ValidationError as error:
            reason = first_problem(error)
            raise RunError(f"{path} line {number} is not a ledger entry ({reason})") from None
    return releases, not raw.endswith(b"\n")


def _charged(sigma: float, others: Iterable[float]) -> float:
    """sigma_joint with 1 / sigma_joint^2 = sum_k 1 / sigma_k^2; 0, no promise, without noise."""
    if not sigma:
        return 0.0
    return float(sum(s**-2 for s in (sigma, *others)) ** -0.5)


def _same(check: str, one: float, other: float) -> Finding:
    return Finding(check, math.isclose(one, other, rel_tol=1e-9), digits(one, other))


def check_export(folder: str | Path, operator: Path | None = None) -> list[Finding]:
    """Every finding about what ``dpbam export`` wrote; the arguments are those of :func:`audit`."""
    export = RunFolder(folder)
    strangers = list(export.strangers())
    if strangers:
        return [Finding("no link leads out of the folder, all files are plain", False,
                        strangers[0])]  # fmt: skip
    if not export.statement_json.is_file():
        raise RunError(f"{export.statement_json} is missing: export the run anew")
    key = None if operator is None else public_key(operator)
    try:
        return [*_exported_files(export), *_exported_statement(export), *signature(export, key)]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        return [Finding("export", False, f"a field is missing or of the wrong kind: {error}")]


def _exported_files(export: RunFolder) -> Iterator[Finding]:
    listed = Exported.read(export.path / EXPORTED).files
    there = exported_files(export)
    odd = sorted({*listed} ^ {*there})
    yield Finding("the folder holds the files that were exported, no others", not odd,
                  ", ".join(odd) or f"{len(there)} files")  # fmt: skip
    for name in sorted({*listed} & {*there}):
        same = there[name] == listed[name]
        yield Finding(f"{name} is the file that was exported", same, str(listed[name]))


def _exported_statement(export: RunFolder) -> Iterator[Finding]:
    statement = Statement.read(export.statement_json)
    weights = export.weights.name
    source = Exported.read(export.path / EXPORTED).exported_from.get(weights, "")
    yield Finding("the statement is about the model that was exported",
                  statement.identity.files.get(weights) == source, source)  # fmt: skip
    allowed = statement.private and weights in statement.may_be_published
    yield Finding("the statement lets the model be published", allowed, weights)
    yield from texts(export, statement)
