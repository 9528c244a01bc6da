"""The private release: sensitivity, noise, accounting and a small audit, with planted mistakes."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from scipy.stats import chi2, norm
from torch import Tensor, nn

from dpbam import PrivacyPlan, PrivateGradientOracle
from dpbam.bias import PrivateStatistics, ReleasedStatistics, release
from dpbam.errors import PlanViolationError
from dpbam.joint_release import StepStatistics
from dpbam.privacy.accounting import Charge, epsilon, total_epsilon
from dpbam.privacy.noise import GaussianNoise, Query
from support import (
    ACCOUNTANTS,
    CLIPPINGS,
    ENGINES,
    METHODS,
    cross_entropy,
    flat,
    in_turn,
    private_plan,
    samples,
    sized_oracle,
    smooth_net,
)

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)


def statistics(**changes: Any) -> PrivateStatistics:
    options = {"noise_multiplier": 5.0, "bias_bound": 0.2, "bias_noise_multiplier": 7.0}
    return PrivateStatistics(THRESHOLDS, **{**options, **changes})


def oracle_with(seen: PrivateStatistics, **changes: Any) -> PrivateGradientOracle:
    names = ("engine", "method", "seed", "noise", "sampling")
    options = {k: changes.pop(k) for k in names if k in changes}
    plan = private_plan(joint_noise_multipliers=seen.noise_multipliers, **changes)
    return sized_oracle(
        smooth_net(), cross_entropy, plan, statistics=seen, physical_batch_size=4, **options
    )


def quiet_sums(x: Tensor, y: Tensor, **changes: Any) -> tuple[Tensor, Tensor]:
    """(counts, bias sum) before noise."""
    kept: dict[str, Tensor] = {}
    right = StepStatistics.queries

    def noticed(self: StepStatistics) -> dict[str, Query]:
        kept.update({name: flat(sums).clone() for name, sums in self._sums.items()})
        return right(self)

    seen = PrivateStatistics(THRESHOLDS, noise_multiplier=5.0, bias_bound=0.2)
    oracle = oracle_with(seen, **{"clip_norm": 0.3, "seed": 1, **changes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepStatistics, "queries", noticed)
        oracle.backward(x, y)
    return kept["counts"], kept["bias"]


def worst_move(**changes: Any) -> tuple[float, float]:
    """The most that leaving one unit out moves the counts and the bias sum, in Euclidean norm."""
    x, y = samples(7)
    x[0], x[1], x[2, 0] = 1e4 * x[0], 0.0, float("nan")  # an outlier, nothing, a broken one
    whole = quiet_sums(x, y, **changes)
    moves = []
    for i in range(len(x)):
        others = torch.arange(len(x)) != i
        left = quiet_sums(x[others], y[others], **changes)
        moves.append([float((a - b).norm()) for a, b in zip(whole, left, strict=True)])
    worst = torch.tensor(moves).max(0).values
    return float(worst[0]), float(worst[1])


# --- sensitivity


@pytest.mark.parametrize(("method", "engine"), in_turn(list(METHODS), ENGINES))
def test_sensitivity_of_every_method(method: str, engine: str) -> None:
    counts, bias = worst_move(engine=engine, method=METHODS[method](0.3))
    assert counts == 1
    assert 0.1 < bias <= 0.2 * (1 + 1e-6)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_sensitivity_with_every_clipping(clipping: str) -> None:
    counts, bias = worst_move(clipping=clipping)
    assert counts == 1
    assert 0.1 < bias <= 0.2 * (1 + 1e-6)


def test_sensitivity_fails_without_the_second_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "removed", lambda norms, factors, bound: 1 - factors)
    x, y = samples(3)
    with pytest.raises(PlanViolationError, match=r"lets a unit add .* to the sum 'bias'"):
        quiet_sums(1e4 * x, y)
    monkeypatch.setattr(StepStatistics, "_verify", lambda self: None)
    whole, left = quiet_sums(1e4 * x, y)[1], quiet_sums(1e4 * x[1:], y[1:])[1]
    assert float((whole - left).norm()) > 0.2 * 2


def test_sensitivity_fails_for_counts_below_each_threshold(monkeypatch) -> None:
    """Cumulative counts look the same and move by up to the root of their number."""
    right = PrivateStatistics._bins
    monkeypatch.setattr(PrivateStatistics, "_bins", lambda self, n: right(self, n).cumsum(0))
    monkeypatch.setattr(StepStatistics, "_verify", lambda self: None)
    assert worst_move()[0] > 1.5


# --- noise


def released_noise(rounds: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """Draws of the noise on counts, bias sum and gradient sum, each of variance 1, if right."""
    x, y = samples(0)
    drawn: dict[str, list[Tensor]] = {"counts": [], "bias": [], "gradient": []}

    class Spy(PrivateStatistics):
        def publish(self, released: dict[str, dict[str, Tensor]]) -> None:
            drawn["counts"].append(released["counts"]["statistics/counts"] / 5.0)
            drawn["bias"].append(flat(released["bias"]) / (7.0 * 0.2))

    seen = Spy(THRESHOLDS, noise_multiplier=5.0, bias_bound=0.2, bias_noise_multiplier=7.0)
    oracle = oracle_with(seen, clip_norm=0.3, seed=11, steps=rounds, sampling="unchecked")
    for _ in range(rounds):
        oracle.backward(x, y)  # an empty batch: noise alone
        grads = flat({n: p.grad for n, p in oracle.model.named_parameters()})
        drawn["gradient"].append(grads * 10 / 0.3)
    found = [torch.stack(drawn[k]) for k in ("counts", "bias", "gradient")]
    return found[0], found[1], found[2]


def variance_p_value(draws: Tensor) -> float:
    """Two-sided: how likely the draws are if they are standard normal."""
    statistic, count = float(draws.square().sum()), draws.numel()
    return 2 * min(chi2.sf(statistic, count), chi2.cdf(statistic, count))


def test_noise_has_the_stated_variance_and_is_independent() -> None:
    counts, bias, gradient = released_noise()
    for draws in (counts, bias, gradient):
        assert variance_p_value(draws) > 1e-4
    for one, other in ((counts[:, 0], bias[:, 0]), (bias[:, 0], gradient[:, 0])):
        z = float((one * other).sum()) / math.sqrt(len(one))
        assert abs(z) < norm.isf(1e-4)


@pytest.mark.parametrize("mistake", ["none", "shared"])
def test_noise_test_fails_on_planted_mistakes(mistake: str, monkeypatch) -> None:
    """No noise on the statistics; or the gradient's stream used again."""
    right = GaussianNoise.add

    def planted(self, sums, std, step, *, stream="noise", start=0, **more):
        if mistake == "none" and stream != "noise":
            return dict(sums)
        return right(self, sums, std, step, start=start, **more)

    monkeypatch.setattr(GaussianNoise, "add", planted)
    counts, bias, gradient = released_noise(100)
    correlated = abs(float((bias[:, 0] * gradient[:, 0]).sum())) / math.sqrt(len(bias))
    failed = variance_p_value(bias) < 1e-4 or correlated > norm.isf(1e-4)
    assert failed
    assert mistake == "shared" or variance_p_value(counts) < 1e-4


def test_secure_noise_serves_the_statistics_too() -> None:
    """Cryptographic draws, rounded to a grid: of the stated size, and never twice the same."""
    x, y = samples(0)
    seen = statistics()
    oracle = oracle_with(seen, noise="secure", steps=60, sampling="unchecked")
    for _ in range(60):
        oracle.backward(x, y)
    counts = torch.tensor([found.counts for found in seen.released]) / 5.0
    assert variance_p_value(counts) > 1e-4
    assert len({found.counts for found in seen.released}) == 60


def test_a_seeded_replay_is_the_same_release_and_free() -> None:
    x, y = samples(6)
    seen = statistics()
    oracle = oracle_with(seen, seed=2)
    state = oracle.state_dict()
    oracle.backward(x, y)
    oracle.load_state_dict(state)
    oracle.backward(x, y)
    assert seen.released[0] == seen.released[1]
    assert len(oracle.ledger) == 1


def test_the_statistics_are_part_of_the_release_that_a_replay_must_repeat() -> None:
    """Same gradients, other statistics, same noise: refused, or the noise would cancel."""
    x, y = samples(6)
    oracle = oracle_with(statistics(), seed=2)
    state = oracle.state_dict()
    oracle.backward(x, y)
    oracle.load_state_dict(state)
    oracle.statistics.thresholds = (0.6, 1.0, 2.0, 4.0)
    oracle.statistics.bias_bound = 0.1
    with pytest.raises(ValueError, match="already used"):
        oracle.backward(x, y)


# --- accounting


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_the_ledger_is_charged_jointly_once(accountant: str) -> None:
    x, y = samples(6)
    oracle = oracle_with(statistics(), accountant=accountant)
    for _ in range(3):
        oracle.backward(x.clone(), y)
    (charge,) = oracle.ledger.charges()
    assert charge.noise_multiplier == pytest.approx((1 + 5.0**-2 + 7.0**-2) ** -0.5)
    assert charge.steps == 3
    assert oracle.ledger.epsilon() == pytest.approx(oracle.plan.epsilon(3))
    alone = epsilon(1.0, 0.1, 3, 1e-3, accountant=accountant)  # the gradient
    assert oracle.ledger.epsilon() > alone


def test_two_separate_events_would_under_count() -> None:
    """The negative control of the joint charge: the same batch, accounted as two samples."""
    joint = (2.0**-2 + 2.0**-2) ** -0.5
    together = total_epsilon([Charge(joint, 0.05, 50)], 1e-5)
    apart = total_epsilon([Charge(2.0, 0.05, 50), Charge(2.0, 0.05, 50)], 1e-5)
    assert apart < together


# q = 1 by Renyi divergences is a closed form
CALIBRATED = pytest.mark.parametrize(
    "settings",
    [
        {"n": 100, "steps": 1, "accountant": "rdp"},
        pytest.param({"n": 1000, "steps": 20}, marks=pytest.mark.slow),
    ],
    ids=["closed form", "subsampled"],
)


@CALIBRATED
def test_calibration_makes_room_for_the_statistics(settings: dict[str, Any]) -> None:
    seen = statistics()
    common = {"epsilon": 3, "delta": 1e-4, "batch_size": 100, **settings}
    alone = PrivacyPlan.calibrate(**common)
    plan = PrivacyPlan.calibrate(**common, joint_noise_multipliers=seen.noise_multipliers)
    assert plan.noise_multiplier > alone.noise_multiplier
    assert plan.charged_noise_multiplier == pytest.approx(alone.noise_multiplier)
    assert 2.99 < plan.epsilon() <= 3


@CALIBRATED
def test_statistics_that_leave_no_budget_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave nothing of the budget"):
        PrivacyPlan.calibrate(
            epsilon=1, delta=1e-4, batch_size=100, joint_noise_multipliers=(0.5,), **settings
        )


@pytest.mark.parametrize("known", [(), (5.0,), (5.0, 8.0)])
def test_a_plan_that_does_not_know_the_release_is_refused(known: tuple[float, ...]) -> None:
    plan = private_plan(joint_noise_multipliers=known)
    with pytest.raises(ValueError, match="joint_noise_multipliers"):
        sized_oracle(smooth_net(), cross_entropy, plan, statistics=statistics())


def test_a_plan_that_expects_a_release_needs_one() -> None:
    with pytest.raises(ValueError, match="joint_noise_multipliers"):
        sized_oracle(smooth_net(), cross_entropy, private_plan(joint_noise_multipliers=(5.0,)))


# --- a small audit: the best test between a batch with and without one unit


class Bare(nn.Module):
    """With its output as the loss, a sample's gradient is its x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def world(x: Tensor, seed: int, rounds: int) -> Tensor:
    """[rounds, 3]: gradient sum, count above the last threshold, bias sum, over their noise."""
    found = []

    class Spy(PrivateStatistics):
        def publish(self, released: dict[str, dict[str, Tensor]]) -> None:
            found.append([float(released["counts"]["statistics/counts"][-1]) / 1.5,
                          float(released["bias"]["statistics/bias/w"]) / (2.0 * 0.2)])  # fmt: skip

    seen = Spy([4.0], noise_multiplier=1.5, bias_bound=0.2, bias_noise_multiplier=2.0)
    plan = private_plan(
        n=1, batch_size=1, joint_noise_multipliers=seen.noise_multipliers, delta=0.5, steps=rounds
    )
    oracle = sized_oracle(
        Bare(), lambda output, y: output, plan, engine="functional", statistics=seen, seed=seed
    )
    for row in range(rounds):
        oracle.backward(x, x)
        found[row].insert(0, float(oracle.model.w.grad))
    return torch.tensor(found, dtype=torch.float64)


def separation(rounds: int = 300) -> float:
    """How many standard deviations apart the likelihood ratio test sees the two worlds.

    One unit with a gradient far above C, present or absent; q = 1, so the oracle is a plain
    Gaussian mechanism, and the worlds are at most 1 / sigma_joint apart.
    """
    present = world(torch.tensor([50.0], dtype=torch.float64), 1, rounds)
    absent = world(torch.zeros(0, dtype=torch.float64), 2, rounds)
    shift = present.mean(0) - absent.mean(0)  # the noise has variance 1, so these are the weights
    return float((present @ shift).mean() - (absent @ shift).mean()) / float((absent @ shift).std())


def test_an_adversary_gains_what_the_joint_charge_says() -> None:
    joint = (1 + 1.5**-2 + 2.0**-2) ** -0.5
    found = separation()
    assert found == pytest.approx(1 / joint, abs=0.2)
    assert found > 1 + 0.1  # more than the gradient's own sigma = 1 would promise


def test_the_audit_fails_without_the_second_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepStatistics, "_verify", lambda self: None)
    monkeypatch.setattr(release, "removed", lambda norms, factors, bound: 1 - factors)
    joint = (1 + 1.5**-2 + 2.0**-2) ** -0.5
    assert separation(100) > 1 / joint + 1


# --- what is released


def test_counts_and_bias_are_near_the_truth() -> None:
    x, y = samples(400)
    seen = PrivateStatistics(THRESHOLDS, noise_multiplier=2.0, bias_bound=10.0)
    plan = private_plan(
        n=1000, batch_size=400, clip_norm=0.3, joint_noise_multipliers=seen.noise_multipliers
    )
    oracle = sized_oracle(smooth_net(), cross_entropy, plan, statistics=seen, seed=0)
    clean = PrivateStatistics(THRESHOLDS, noise_multiplier=2.0, bias_bound=10.0)
    quiet = sized_oracle(
        smooth_net(), cross_entropy,
        PrivacyPlan.non_private(n=1000, batch_size=400, steps=1, clip_norm=0.3,
                                joint_noise_multipliers=clean.noise_multipliers),
        statistics=clean,
    )  # fmt: skip
    oracle.backward(x, y)
    quiet.backward(x, y)
    (noisy,), (true,) = seen.released, clean.released
    assert sum(true.counts) == 400
    assert noisy.counts != true.counts
    assert noisy.counts == pytest.approx(true.counts, abs=5 * 2.0)
    above = [sum(seen.counts[1:]) / sum(seen.counts) for seen in (noisy, true)]  # C comes first
    assert above[0] == pytest.approx(above[1], abs=0.1)
    assert abs(noisy.bias**2 - true.bias**2) < 5 * noisy.bias_square_std
    assert noisy.thresholds == (0.3, 0.5, 1.0, 2.0, 4.0)


def test_the_bias_that_is_released_is_the_lens_s_own_reading() -> None:
    from dpbam.bias import BiasLens

    x, y = samples(30)
    lens = BiasLens()
    seen = PrivateStatistics(THRESHOLDS, noise_multiplier=2.0, bias_bound=100.0)
    plan = PrivacyPlan.non_private(
        n=100, batch_size=30, steps=1, clip_norm=0.3, joint_noise_multipliers=seen.noise_multipliers
    )
    oracle = sized_oracle(smooth_net(), cross_entropy, plan, statistics=seen, observers=lens)
    oracle.backward(x, y)
    bias = lens.records[0].non_private_against_own.bias
    assert seen.released[0].bias == pytest.approx(bias, rel=1e-9)


def test_a_statistic_does_not_get_the_batch_gradient() -> None:
    """It would be kept before attributes are compared, and has no noise."""

    class Asks(PrivateStatistics):
        def begin(self, facts: Any) -> None:
            super().begin(facts)
            self.kept = facts.batch_gradient()

    asks = Asks(THRESHOLDS, noise_multiplier=5.0)
    plan = private_plan(joint_noise_multipliers=asks.noise_multipliers)
    oracle = sized_oracle(smooth_net(), cross_entropy, plan, statistics=asks)
    with pytest.raises(PlanViolationError, match="batch gradient"):
        oracle.backward(*samples(3))
    assert len(oracle.ledger) == oracle.step == 0


def test_nothing_is_handed_out_before_the_ledger_has_it(monkeypatch) -> None:
    x, y = samples(6)
    seen = statistics()
    oracle = oracle_with(seen)

    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(oracle.ledger, "charge", broken)
    with pytest.raises(OSError, match="disk full"):
        oracle.backward(x, y)
    assert seen.released == []


def test_a_release_survives_json() -> None:
    found = ReleasedStatistics(3, (0.5, 1.0), (1.0, 2.0, 3.0), 5.0, 1.0)
    assert asdict(found)["step"] == 3
    assert found.quantile(0.9) == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"bias_bound": -1.0}, "bias_bound"),
        ({"bias_bound": None}, "needs a bias_bound"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        statistics(**options)


def test_norms_are_counted_above_the_clipping_norm_of_their_step() -> None:
    """With a schedule C_t differs from the plan's C, and so does the share that is clipped."""
    model, (x, y) = smooth_net(), samples(9)
    statistics = PrivateStatistics([0.5], noise_multiplier=20.0)
    plan = private_plan(
        clip_norm=0.3, steps=2, clip_schedule=(1.0, 0.5),
        joint_noise_multipliers=statistics.noise_multipliers,
    )  # fmt: skip
    oracle = sized_oracle(model, cross_entropy, plan, statistics=statistics, seed=0)
    for _ in range(2):
        oracle.backward(x.clone(), y)
    expected = [0.3 * plan.clip_factor_at(step) for step in range(2)]
    assert [released.clip_norm for released in statistics.released] == expected
    assert [released.thresholds[0] for released in statistics.released] == expected
