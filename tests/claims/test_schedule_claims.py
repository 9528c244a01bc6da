"""The ledger holds, for each step, the noise that the step had over what one unit could move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpbam import PrivacyPlan, mechanism
from dpbam.privacy.clipping import StepClipping
from dpbam.privacy.noise import GaussianNoise
from planting import Mistake, catches
from support import cross_entropy, private_plan, samples, sized_oracle, smooth_net


def check_each_step_is_charged_as_noised(clipping: str = "flat") -> None:
    """Noise over (C_t at the step, clip schedule included) is the sigma on the ledger."""
    plan = private_plan(
        clipping=clipping, steps=6, noise_schedule=(2.0, 1.0, 0.5), clip_schedule=(3.0, 1.0)
    )
    oracle = sized_oracle(smooth_net(), cross_entropy, plan, seed=0)
    stds, bounds, add = [], [], oracle.noise.add

    def seen(sums, std, step, **options):
        stds.append(std)
        return add(sums, std, step, **options)

    oracle.noise.add = seen
    per_step = 1 if clipping == "flat" else 2  # the gradient, and the extra coordinates
    for step in range(6):
        bounds += per_step * [oracle.clipping.sensitivity * (3.0 if step < 3 else 1.0)]
        oracle.backward(*samples(9 + step % 2))
    charged = [entry["noise_multiplier"] for entry in oracle.ledger.entries()]
    ratios = [s / c for s, c in zip(stds, bounds, strict=True)]
    assert ratios == pytest.approx([sigma for sigma in charged for _ in range(per_step)])
    assert charged == [2.0, 2.0, 1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("clipping", ["flat", "quantile", "slaclip"])
def test_each_step_is_charged_as_noised(clipping: str) -> None:
    check_each_step_is_charged_as_noised(clipping)


def check_an_adaptive_clip_is_charged_as_noised() -> None:
    check_each_step_is_charged_as_noised("slaclip")


def check_a_noise_of_the_users_own_is_charged_as_it_states() -> None:
    class Half(GaussianNoise):
        def charged(self, noise_multiplier: float) -> float:
            return noise_multiplier / 2

    made = sized_oracle(smooth_net(), cross_entropy, private_plan(), seed=0)
    oracle = sized_oracle(
        smooth_net(), cross_entropy, private_plan(), noise=Half(made.noise.randomness), seed=0
    )
    oracle.backward(*samples(9))
    assert oracle.ledger.charges()[0].noise_multiplier == 0.5


def sensitive_as(sensitivity):
    """A clipping of a step that states another sensitivity."""

    def mistake(original):
        return property(lambda step: sensitivity(step._clipping, step._phi))

    return mistake


def moved_first(original):
    def clipped_sums(step):
        queries, clipping = original(step), step.clipping._clipping
        before = clipping.sensitivity
        clipping._move(0.0, 0.3)
        moved = clipping.sensitivity / before
        return {name: replace(query, std=query.std * moved) for name, query in queries.items()}

    return clipped_sums


MISTAKES = {
    "the plan's sigma charged at every step": Mistake(
        check_each_step_is_charged_as_noised, PrivacyPlan, "charged_at",
        lambda original: lambda self, step: self.noise_multiplier,
    ),
    "noise for C where the clip is at 3 C": Mistake(
        check_each_step_is_charged_as_noised, StepClipping, "sensitivity",
        sensitive_as(lambda clipping, phi: clipping.sensitivity),
    ),
    "noise for the first C after C has grown": Mistake(
        check_an_adaptive_clip_is_charged_as_noised, StepClipping, "sensitivity",
        sensitive_as(lambda clipping, phi: phi),
    ),
    "C adapted before the noise is drawn": Mistake(
        check_an_adaptive_clip_is_charged_as_noised, mechanism, "clipped_sums", moved_first,
    ),
    "a noise of the user's own charged as the plan's": Mistake(
        check_a_noise_of_the_users_own_is_charged_as_it_states, PrivacyPlan, "charged_at",
        lambda original: lambda self, step: 2 * original(self, step),
    ),
}  # fmt: skip


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
