"""The plan: one object from which sampler, noise and accountant are made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from dpbam import PrivacyPlan
from dpbam.privacy.accounting import epsilon
from dpbam.privacy.clipping import AutomaticClipping, FlatClipping, PerLayerClipping
from dpbam.privacy.plan import epoch_steps
from support import private_plan, quiet_plan


@pytest.fixture(scope="session")
def calibrated() -> PrivacyPlan:
    return PrivacyPlan.calibrate(epsilon=3, delta=1e-4, n=1437, batch_size=512, epochs=20)


def test_calibration_meets_the_target_and_never_overshoots(calibrated: PrivacyPlan) -> None:
    assert calibrated.steps == 56
    assert 2.99 < calibrated.epsilon() <= 3


def test_everything_comes_from_the_same_fields(calibrated: PrivacyPlan) -> None:
    q = 512 / 1437
    assert calibrated.sampling_rate == calibrated.sampler().sampling_rate == q
    assert (calibrated.sampler().n, len(calibrated.sampler())) == (1437, 56)
    assert calibrated.epsilon() == epsilon(calibrated.noise_multiplier, q, 56, 1e-4)
    assert calibrated.epochs == pytest.approx(20, abs=0.1)
    ledger = calibrated.ledger()
    assert (ledger.delta, ledger.accountant) == (1e-4, "pld")


def test_the_rate_is_not_one_over_the_number_of_batches() -> None:
    plan = private_plan(n=1000, batch_size=300)
    assert plan.sampling_rate == 0.3
    assert plan.sampling_rate != 1 / math.ceil(1000 / 300)


def test_a_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        private_plan().noise_multiplier = 0.1


def test_epsilon_after_some_steps() -> None:
    plan = private_plan(accountant="rdp")
    assert plan.epsilon(0) == 0
    assert 0 < plan.epsilon(5) < plan.epsilon()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("flat", FlatClipping), ("automatic", AutomaticClipping), ("per-layer", PerLayerClipping)],
)
def test_the_clipping_has_the_plans_sensitivity(name: str, kind: type) -> None:
    clipping = private_plan(clipping=name, clip_norm=0.7).clipper()
    assert isinstance(clipping, kind)
    assert clipping.sensitivity == 0.7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_multiplier": 0.0}, r"noise_multiplier must be positive.*non_private"),
        ({"noise_multiplier": -1.0}, r"noise_multiplier must be positive"),
        ({"noise_multiplier": math.nan}, r"noise_multiplier must be a number, got NaN"),
        ({"clip_norm": math.inf}, r"clip_norm must be positive and finite.*non_private"),
        ({"clip_norm": -1.0}, r"clip_norm must be positive"),
        ({"clip_norm": math.nan}, r"clip_norm must be a number, got NaN"),
        ({"delta": 0.0}, r"delta must lie strictly between 0 and 1"),
        ({"delta": 1.0}, r"delta must lie strictly between 0 and 1"),
        ({"delta": math.nan}, r"delta must be a number, got NaN"),
        ({"n": 0}, r"n must be at least 1"),
        ({"batch_size": 101}, r"batch_size 101 exceeds the 100 units"),
        ({"steps": 0}, r"steps must be at least 1"),
        ({"max_records": 3}, r"max_records is 3 but the unit is a record.*unit='patient'"),
        ({"accountant": "plt"}, r"accountant 'plt' is unknown: did you mean 'pld'"),
        ({"clipping": "flatt"}, r"clipping 'flatt' is unknown: did you mean 'flat'"),
    ],
)
def test_wrong_values_are_refused_with_the_way_out(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        private_plan(**changes)


@pytest.mark.parametrize("field", ["n", "batch_size", "steps"])
def test_counts_are_whole_numbers(field: str) -> None:
    with pytest.raises(TypeError, match=f"{field} must be a whole number, got 2.5"):
        private_plan(**{field: 2.5})


def test_a_delta_above_one_over_n_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="allows publishing a whole record"):
        private_plan(delta=0.02)


@pytest.mark.parametrize("given", [{}, {"epochs": 1, "steps": 5}])
def test_calibration_needs_epochs_or_steps(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give epochs or steps"):
        PrivacyPlan.calibrate(epsilon=1, delta=1e-5, n=100, batch_size=10, **given)


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_calibration_needs_a_positive_epsilon(target: float) -> None:
    with pytest.raises(ValueError, match="epsilon must be"):
        PrivacyPlan.calibrate(epsilon=target, delta=1e-5, n=100, batch_size=10, steps=5)


def test_epochs_become_steps() -> None:
    assert epoch_steps(1000, 300, 3) == 10
    assert epoch_steps(10, 10, 0.01) == 1


# --- without privacy, asked for by name


def test_without_privacy_epsilon_is_infinite_and_says_so() -> None:
    plan = quiet_plan()
    assert (plan.private, plan.clip_norm, plan.noise_multiplier) == (False, math.inf, 0.0)
    assert plan.epsilon() == math.inf
    assert quiet_plan(1.0, noise_multiplier=5.0).epsilon() == math.inf


def test_noise_without_clipping_has_no_scale() -> None:
    with pytest.raises(ValueError, match="without clipping there can be none"):
        quiet_plan(noise_multiplier=1.0)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan])
def test_without_privacy_values_are_still_checked(clip_norm: float) -> None:
    with pytest.raises(ValueError, match="clip_norm must be"):
        quiet_plan(clip_norm)


def test_a_clip_schedule_that_float32_cannot_hold_is_refused() -> None:
    private_plan(clip_norm=1e-4, clip_schedule=(1.0, 1e-5))
    with pytest.raises(ValueError, match=r"at least 1e-10, got 1e-22.*vanish in float32"):
        private_plan(clip_norm=1e-10, clip_schedule=(1.0, 1e-12))


@pytest.mark.parametrize("kind", [iter, list, np.float16])
def test_statistics_are_charged_whatever_holds_their_multipliers(kind: Any) -> None:
    fields = {"n": 100, "batch_size": 10, "steps": 9, "noise_multiplier": 1.0, "delta": 1e-3}
    plan = PrivacyPlan(**fields, joint_noise_multipliers=kind([20.0]))
    assert plan.joint_noise_multipliers == (20.0,)
    assert plan.charged_noise_multiplier < 1
