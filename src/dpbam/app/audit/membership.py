"""Attack a run's released model: which records was it trained on?

The attacker has the model and the records, and decides of each record whether it was in the
training set. Members are the training records, non-members the test records.

======================  =========================================================================
attack                  score of a record: the higher, the more like a member
======================  =========================================================================
loss                    log(p / (1 - p)), p the model's probability of the true class
gradient                -log |g|, g the record's gradient at the released weights
..., shadow models      log of the likelihood ratio of that number under models that were trained
                        with the record and without it (Carlini et al. 2022, with shared variances)
======================  =========================================================================

Shadow models are trained by the run's own configuration on random halves of all records. They, the
scores and the curves are not protected by privacy: they are for the operator only.

Guarantee: with probability ``confidence``, no lower limit exceeds the true positive rate of its
attack at that false positive rate, at all levels and for all attacks together (Clopper-Pearson and
a union bound). By the definition of the trade-off function f no attack on a right mechanism has a
true positive rate above 1 - f, so a lower limit above the curve refutes the claim.

Assumptions: records are independent, members and non-members drawn from one population (a test set
that was collected elsewhere differs by itself), and one record more or less in the training set
changes the scores of records outside it by a negligible amount.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv

from dpbam import _validate
from dpbam.app.report.charts import Series, lines
from dpbam.app.report.figure import Figure, Panel
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.folder import RunFolder, stored_config
from dpbam.app.runs.meaning import NAMES, names_code
from dpbam.app.runs.model_file import load_run_model
from dpbam.app.runs.pool import Send, run_tasks
from dpbam.app.runs.preparation import Prepared, prepare
from dpbam.app.runs.run import RunError
from dpbam.app.runs.spending import stored_ledger
from dpbam.batches import LogicalBatch, Views
from dpbam.compute import Compute, Runner
from dpbam.data import DataSet, to_float
from dpbam.data.base import Concatenated
from dpbam.errors import ArgumentError
from dpbam.methods import DPSGD
from dpbam.params import device_of, evaluating, trainable
from dpbam.privacy.rounding import up
from dpbam.privacy.tradeoff import TradeOff, trade_off
from dpbam.training.evaluation import predict_logits
from dpbam.training.events import Reporter

Scores = NDArray[np.float64]

LEVELS = (0.001, 0.01, 0.1)  # false positive rates at which limits are stated
STATISTICS = ("loss", "gradient")
_ROWS = 256  # records whose gradients are computed at once
_LEAST_NORM = 1e-30
_FALSE_POSITIVE_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # drawn
_LEAST = 0.001  # where the axes begin: what is less is drawn there
Statistics = NDArray[np.float64]  # [statistic, record]


class Rate(NamedTuple):
    """An attack whose false positive rate is at most ``level``, by an upper confidence limit.

    Attributes:
        level: of the false positive rate.
        false_positives: non-members called members; None if there are too few non-members to show
            that any threshold stays below the level.
        seen: true positive rate, as counted.
        least: its lower confidence limit.
        best_possible: 1 - f(level), the most that the run's mechanism allows.
    """

    level: float
    false_positives: int | None
    seen: float
    least: float
    best_possible: float


def rate_at_most(count: float, trials: int, error: float) -> float:
    """Clopper-Pearson: a rate that the true one exceeds with probability ``error`` at most.

    Example:
        >>> round(rate_at_most(0, 100, 0.05), 4)  # the rule of three
        0.0295
    """
    return 1.0 if count >= trials else float(betaincinv(count + 1, trials - count, 1 - error))


@dataclass(frozen=True)
class Attack:
    """One attack: the scores of members and of non-members, not to be shared."""

    name: str
    members: Scores = field(repr=False)
    others: Scores = field(repr=False)

    def true_positives(self, false_positives: int) -> int:
        """The members above the threshold that lets ``false_positives`` non-members through."""
        ordered = np.sort(self.others)[::-1]
        rest = ordered[false_positives:]
        return int((self.members > rest[0]).sum()) if len(rest) else len(self.members)

    def rate(self, level: float, error: float, best_possible: float) -> Rate:
        """The true positive rate at ``level``; each of its two limits may fail with ``error``.

        The threshold is a non-member's score, so it does not depend on the members', and the
        number of non-members above it is exact: Clopper-Pearson holds for both.
        """
        n, m = len(self.others), len(self.members)
        allowed = [k for k in range(int(level * n) + 1) if rate_at_most(k, n, error) <= level]
        if not allowed:
            return Rate(level, None, 0.0, 0.0, best_possible)
        true_positives = self.true_positives(allowed[-1])
        least = 1 - rate_at_most(m - true_positives, m, error)
        return Rate(level, allowed[-1], true_positives / m, least, best_possible)


@dataclass(frozen=True)
class MembershipResult:
    """The outcome of the attacks on one released model. Not to be shared.

    Attributes:
        run: the folder.
        epsilon: of the run's statement.
        delta: its delta.
        attacks: each with its scores.
        curve: the trade-off of the run's mechanism; None without noise: nothing is ruled out.
        confidence: of all lower limits together.
        shadows: how many shadow models were trained.
    """

    run: Path
    epsilon: float
    delta: float
    attacks: list[Attack]
    curve: TradeOff | None
    confidence: float
    shadows: int

    def best_possible(self, level: float) -> float:
        """1 - f(level): the best true positive rate that the mechanism allows."""
        return 1.0 if self.curve is None else self.curve.power(level)

    def rates(self, attack: Attack) -> list[Rate]:
        """The attack's rates at every level."""
        error = (1 - self.confidence) / (2 * len(LEVELS) * len(self.attacks))
        return [attack.rate(level, error, self.best_possible(level)) for level in LEVELS]

    @property
    def violated(self) -> bool:
        """Whether a lower limit lies above what the mechanism allows."""
        return any(r.least > r.best_possible for a in self.attacks for r in self.rates(a))

    @property
    def above_chance(self) -> bool:
        """Whether a lower limit lies above the false positive rate: some membership shows."""
        return any(r.least > r.level for a in self.attacks for r in self.rates(a))

    @property
    def verdict(self) -> str:
        """Say what was found, and what it does not show."""
        if self.violated:
            return (
                "the claim is refuted, or members and non-members differ by themselves: an attack "
                "finds more members than the run's mechanism allows"
            )
        summary = (
            "these attacks distinguish members from non-members better than chance"
            if self.above_chance
            else "these attacks do not distinguish members from non-members"
        )
        if self.curve is None:
            return f"{summary}; without a promise, other attacks may find everyone"
        return (
            f"{summary}, and not better than the run's mechanism allows. Other attacks may do "
            "better, up to the best possible rate; what protects against all of them is the proof"
        )

    def to_dict(self) -> dict[str, object]:
        """Everything but the scores, as plain values."""
        return {
            "run": str(self.run),
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else "infinite",
            "delta": self.delta,
            "confidence": self.confidence,
            "shadows": self.shadows,
            "members": len(self.attacks[0].members),
            "non_members": len(self.attacks[0].others),
            "non_private_rates": {a.name: [r._asdict() for r in self.rates(a)]
                                  for a in self.attacks},
            "violated": self.violated,
            "verdict": self.verdict,
        }  # fmt: skip


def attack_run(
    run: str | Path,
    *,
    shadows: int = 16,
    confidence: float = 0.95,
    jobs: int = 1,
    own_code: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MembershipResult:
    """Attack the released model of a finished run with its own data.

    Args:
        run: the folder.
        shadows: models to train; 0: none. More make the attack stronger.
        confidence: of all lower limits together.
        jobs: processes.
        own_code: call functions and classes that the run names as its data, model or method.
        progress: called with (shadow models done, all).

    Raises:
        RunError: if the run, its data or its task cannot be attacked.
    """
    _validate.probability("confidence", confidence)
    if shadows and (_validate.count("shadows", shadows) < 4 or shadows % 2):
        raise ArgumentError(f"shadows must be 0 or an even number from 4, got {shadows}")
    folder = RunFolder(run)
    if not folder.started:
        raise RunError(f"{run} is no run folder: an attack needs the folder of a finished run")
    config = stored_config(run)
    prepared = _prepared(folder, config, own_code)
    members = len(prepared.train)
    everyone = _everyone(prepared)
    weights = load_run_model(run, own_model=config.model).module.state_dict()
    prepared.model.load_state_dict(weights)
    released = statistics(prepared, everyone)
    attacks = dict(zip(STATISTICS, released, strict=True))
    if shadows:
        tasks = [partial(_shadow, config, prepared.plan.noise_multiplier, k, shadows)
                 for k in range(shadows)]  # fmt: skip
        done = iter(range(1, shadows + 1))
        shadow_scores = run_tasks(tasks, jobs, on_result=lambda *_: progress(next(done), shadows))
        inside = halves(len(everyone), shadows)
        for k, name in enumerate(STATISTICS):
            ratios = likelihood_ratios(released[k], np.stack([s[k] for s in shadow_scores]), inside)
            attacks[f"{name}, shadow models"] = ratios
    ledger = stored_ledger(folder, prepared.plan.delta, prepared.plan.accountant)  # only read
    return MembershipResult(
        folder.path, ledger.epsilon(), prepared.plan.delta,
        [Attack(name, s[:members], s[members:]) for name, s in attacks.items()],
        trade_off(ledger.charges()), confidence, shadows,
    )  # fmt: skip


def _prepared(folder: RunFolder, config: RunConfig, own_code: bool) -> Prepared:
    """The run's data and plan, if they are still what it was trained with."""
    named = [f"{name} {value}" for name, value in config.to_mapping().items()
             if name in NAMES and names_code(name, str(value or ""))]  # fmt: skip
    if named and not own_code:
        raise RunError(
            f"{folder.path} names code to run, {named[0]}: if you trust it, add --own-code"
        )
    facts = folder.read_facts()
    if not folder.weights.is_file():
        raise RunError(f"{folder.path} has no model: an attack needs the folder of a finished run")
    prepared = prepare(config, noise_multiplier=facts.noise_multiplier or None)
    if prepared.train.fingerprint() != facts.non_private_fingerprint:
        raise RunError(f"the data of {folder.path} have changed: an attack needs its training set")
    task, unit = prepared.train.task, prepared.plan.unit
    if task != "single-label" or unit != "record" or config.on_features:
        encoder = " and features that are computed once" if config.on_features else ""
        raise RunError(
            f"{folder.path} has the task {task}, the unit {unit}{encoder}: the attack is for one "
            "class per record, records as units, and images"
        )
    return prepared


def _everyone(prepared: Prepared) -> DataSet:
    """Training records, then test records."""
    train, test = prepared.train, prepared.test
    return DataSet(
        f"{train.name} and {test.name}", Concatenated([train.images, test.images]),
        np.concatenate([train.labels, test.labels]), train.class_names,
    )  # fmt: skip


def statistics(prepared: Prepared, records: DataSet) -> Statistics:
    """log(p / (1 - p)) of the true class, and -log |g|, of every record: [2, N]."""
    logits, labels = predict_logits(prepared.model, records)
    true_logit = logits.double().gather(1, labels[:, None])
    others = logits.double().scatter(1, labels[:, None], -torch.inf)
    margin = true_logit[:, 0] - others.logsumexp(1)
    norms = torch.cat(list(_norms(prepared, records))).double()
    return np.stack([margin.numpy(), -norms.clamp(min=_LEAST_NORM).log().numpy()])


def _norms(prepared: Prepared, records: DataSet) -> Iterator[torch.Tensor]:
    """|g_i| over all trained parameters, without augmentation."""
    model, groups = prepared.model, dict.fromkeys(trainable(prepared.model), 0)
    with evaluating(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the fused engine does not support")
        engine = Runner(Compute(engine=prepared.config.engine), model, prepared.task, groups)
        for start in range(0, len(records), _ROWS):
            images, labels = records.batch(np.arange(start, min(start + _ROWS, len(records))))
            batch = LogicalBatch.of(to_float(images), labels, None, 1)
            for physical in batch.split(_ROWS, Views(), device_of(model)):
                yield engine.directions(physical, DPSGD(), 0.0).norms()[0].detach().cpu()


def halves(records: int, shadows: int) -> NDArray[np.bool_]:
    """Who is in the training set of which shadow model: [S, N], each record in half of them."""
    order = np.random.default_rng(0).random((shadows, records)).argsort(0)
    return np.asarray(order < shadows // 2)


def _shadow(config: RunConfig, sigma: float, k: int, shadows: int, send: Send) -> Statistics:
    """Train the k-th shadow model, seeded, and return the statistics of all records."""
    quiet = config.replace(seed=k, noise_seed=None, noise="standard", budget=None,
                           release_norms=None, release_counts=None, release_centre=None,
                           balance=0.0, measure_bias=None, eval_every=10**9, num_workers=0,
                           auto_facts={}, auto_settings=())  # fmt: skip
    prepared = prepare(quiet, noise_multiplier=sigma or None)
    everyone = _everyone(prepared)
    members = everyone.subset(np.flatnonzero(halves(len(everyone), shadows)[k]))
    quiet = quiet.replace(batch_size=min(prepared.plan.batch_size, len(members)))
    plan = quiet.plan(len(members), noise_multiplier=sigma or None)
    shadow = replace(prepared, config=quiet, train=members, plan=plan)
    trainer = shadow.trainer(shadow.oracle(), Reporter())
    trainer.run()
    with trainer.averaged():
        return statistics(shadow, everyone)


def likelihood_ratios(
    released: Scores, shadows: NDArray[np.float64], inside: NDArray[np.bool_]
) -> Scores:
    """log N(x; mean_in, s_in) - log N(x; mean_out, s_out), means by record, variances shared.

    Terms that are the same for all records are left out: they move no threshold.

    Args:
        released: [N] the statistic at the released model.
        shadows: [S, N] the same at the shadow models.
        inside: [S, N] whether the record was in the shadow model's training set.
    """
    logs = []
    for chosen in (inside, ~inside):
        count = chosen.sum(0)
        mean = np.where(chosen, shadows, 0.0).sum(0) / np.maximum(count, 1)
        variance = np.where(chosen, (shadows - mean) ** 2, 0.0).sum() / max(1, (count - 1).sum())
        logs.append(-((released - mean) ** 2) / (2 * variance + 1e-12))
    return np.asarray(logs[0] - logs[1])


def save_roc(results: Sequence[MembershipResult], path: Path, about: str = "training") -> None:
    """One panel per released model: attacks, lower limits, chance and the best possible attack."""
    caption = (
        "Members found at each false positive rate, lower confidence limits of the best attack, "
        "and the most that the run's mechanism allows any attack. Rates below 0.1% are drawn there."
    )
    Figure("attack", "Attack", caption, about, [_roc(r) for r in results]).save(path)


def _roc(result: MembershipResult) -> Panel:
    rates = _FALSE_POSITIVE_RATES
    best = [1.0 if result.curve is None else 1 - float(result.curve(x)) for x in rates]
    rates_by_attack = [
        [rate for rate in result.rates(a) if rate.false_positives is not None]
        for a in result.attacks
    ]
    levels = tuple(rate.level for rate in rates_by_attack[0])
    limits = [max(rate.least for rate in same) for same in zip(*rates_by_attack, strict=True)]
    series = [
        Series("best possible", 0, rates, tuple(best)),
        Series("chance", 7, rates, rates),
        *(Series(a.name, k, rates, _seen(a)) for k, a in enumerate(result.attacks, 1)),
        Series("lower limits", 5, levels, tuple(max(x, _LEAST) for x in limits), style="points"),
    ]
    title = f"epsilon {'infinite' if math.isinf(result.epsilon) else up(result.epsilon)}"
    panel = lines(title, "false positive rate", "true positive rate", series, percent=True,
                  log_x=True, log_y=True)  # fmt: skip
    panel.view["encoding"]["x"]["axis"] |= {"values": [0.001, 0.01, 0.1, 1], "format": "~%"}
    return panel


def _seen(attack: Attack) -> tuple[float, ...]:
    """The counted true positive rates; NaN where fewer than one non-member may pass."""
    n, m = len(attack.others), len(attack.members)
    return tuple(
        max(attack.true_positives(int(rate * n)) / m, _LEAST) if rate * n >= 1 else math.nan
        for rate in _FALSE_POSITIVE_RATES
    )
