"""The advisor's forecasts against private gradients that are actually drawn."""

from __future__ import annotations

import pytest
import torch

from dpbam import DPSGD
from dpbam.bias import advise
from dpbam.bias.advisor import WARNING
from support import (
    cross_entropy,
    flat,
    one_step,
    private_plan,
    quiet_plan,
    samples,
    sized_oracle,
    smooth_net,
)

N = 400


def drawn_cosine(clip_norm: float, batch_size: int, rounds: int = 40) -> float:
    """The mean cosine of private gradients of random batches with the gradient of all samples."""
    model, (x, y) = smooth_net(), samples(N)
    truth = flat(one_step(model, quiet_plan(n=N, batch_size=N), x, y))
    plan = private_plan(
        n=10_000, batch_size=batch_size, clip_norm=clip_norm, delta=1e-5, steps=rounds
    )
    oracle = sized_oracle(
        model, cross_entropy, plan, DPSGD(), seed=0, engine="functional", physical_batch_size=64,
        sampling="unchecked",
    )  # fmt: skip
    generator, total = torch.Generator().manual_seed(0), 0.0
    for _ in range(rounds):
        chosen = torch.randperm(N, generator=generator)[:batch_size]
        oracle.backward(x[chosen], y[chosen])
        g = flat({n: p.grad for n, p in model.named_parameters()})
        total += float(g @ truth / g.norm() / truth.norm())
    return total / rounds


def test_the_forecast_cosine_is_what_is_drawn() -> None:
    model, (x, y) = smooth_net(), samples(N)
    plan = quiet_plan(8.0, n=10_000, batch_size=40, noise_multiplier=1.0)
    batches = [(x[:150], y[:150]), (x[150:], y[150:])]
    advice = advise(model, cross_entropy, plan, batches, lambdas=())
    assert advice.units == N
    for option in advice.options:
        assert option.non_private_cosine == pytest.approx(
            drawn_cosine(option.clip_norm, 40), abs=0.06
        )
    cosines = [option.non_private_cosine for option in advice.options]
    assert max(cosines) - min(cosines) > 0.05  # else the agreement would say nothing


def test_bias_falls_and_noise_rises_with_c() -> None:
    model, (x, y) = smooth_net(), samples(N)
    advice = advise(model, cross_entropy, quiet_plan(0.5, n=N), [(x, y)], lambdas=())
    biases = [option.non_private_bias for option in advice.options]
    shares = [option.non_private_clip_share for option in advice.options]
    assert biases == sorted(biases, reverse=True)
    assert shares == sorted(shares, reverse=True)
    assert biases[0] > 2 * biases[-1]
    assert 0.5 in [option.clip_norm for option in advice.options]
    noises = [o.noise_norm for o in advise(
        model, cross_entropy, quiet_plan(0.5, noise_multiplier=1.0), [(x, y)], lambdas=()
    ).options]  # fmt: skip
    assert noises == sorted(noises)
    assert noises[-1] > 2 * noises[0]


@pytest.mark.slow
def test_larger_batches_have_less_noise_at_the_same_epsilon() -> None:
    model, (x, y) = smooth_net(), samples(N)
    plan = private_plan(n=1000, accountant="rdp", delta=1e-4)
    advice = advise(model, cross_entropy, plan, [(x, y)], lambdas=())
    noises = [option.noise_norm for option in advice.batch_sizes]
    assert [option.batch_size for option in advice.batch_sizes] == [2, 5, 10, 20, 40]
    assert noises == sorted(noises, reverse=True)


def test_the_recommendation_has_a_reason_and_the_warning() -> None:
    model, (x, y) = smooth_net(), samples(N)
    plan = quiet_plan(8.0, n=10_000, batch_size=40, noise_multiplier=1.0)
    advice = advise(model, cross_entropy, plan, [(x, y)], lam=0.01)
    text = str(advice)
    assert advice.best.clip_norm < 8.0  # nothing is clipped at 8, and all of it is noise
    assert f"Try C = {advice.best.clip_norm:g}" in text
    ratios = advice.now.non_private_noise_ratio, advice.best.non_private_noise_ratio
    assert ratios[0] > 2 * ratios[1]
    assert f"{ratios[0]:.2g} times as long" in text
    assert text.endswith(WARNING)
    assert {option.lam for option in advice.options} == {0.0, 0.005, 0.01, 0.02}


def test_a_setting_that_is_right_is_kept() -> None:
    model, (x, y) = smooth_net(), samples(N)
    advice = advise(model, cross_entropy, quiet_plan(1e3, n=N), [(x, y)], lambdas=())
    assert "Keep C = 1000" in str(advice)


def test_the_recommendation_does_not_contradict_the_batch_sizes() -> None:
    model, (x, y) = smooth_net(), samples(N)
    plan = quiet_plan(1.0, n=10_000, batch_size=20, noise_multiplier=20.0)
    advice = advise(model, cross_entropy, plan, [(x, y)], lambdas=())
    larger = max(advice.batch_sizes, key=lambda option: option.non_private_cosine)
    assert larger.non_private_cosine > advice.now.non_private_cosine + 0.01
    assert f"A batch size of {larger.batch_size} in place of 20" in str(advice)
    assert "no other setting" not in str(advice)


def test_one_sample_is_not_enough() -> None:
    model, (x, y) = smooth_net(), samples(1)
    with pytest.raises(ValueError, match="at least 2 samples"):
        advise(model, cross_entropy, quiet_plan(1.0), [(x, y)], lambdas=())
