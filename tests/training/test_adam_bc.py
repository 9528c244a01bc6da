"""DP-AdamBC against torch's optimisers, and against the paper's formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpbam.errors import ArgumentError
from dpbam.filters import Exponential
from dpbam.training.adam_bc import AdamBC
from support import cross_entropy, private_plan, quiet_plan, samples, sized_oracle, smooth_net

TORCH = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam}


@pytest.mark.parametrize("kind", TORCH)
def test_without_noise_it_is_torchs(kind: str) -> None:
    found = []
    for corrected in (True, False):
        model = smooth_net()
        oracle = sized_oracle(model, cross_entropy, quiet_plan(1.0))
        options = {"lr": 0.05, "weight_decay": 0.1}
        optimizer = (
            AdamBC(model.parameters(), oracle, kind=kind, **options)
            if corrected
            else TORCH[kind](model.parameters(), **options)
        )
        for _ in range(4):
            oracle.backward(*samples(6))
            optimizer.step()
        found.append(nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(*found)


def test_the_variance_of_the_noise_is_subtracted_from_the_second_moment() -> None:
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, private_plan(clip_schedule=(1.0, 3.0)), seed=1)
    optimizer = AdamBC(model.parameters(), oracle, lr=0.05, floor=0.2)
    weight = model[0].weight
    m = v = w = torch.zeros_like(weight)
    for t in range(1, 13):
        oracle.backward(*samples(11 + t % 2))
        g, theta = weight.grad, weight.detach().clone()
        optimizer.step()
        phi = (1.0 * (1.0 if t <= 10 else 3.0) / 10) ** 2  # (sigma C_t / l)^2
        m, v, w = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2, 0.999 * w + 0.001 * phi
        seen = torch.maximum(v - w, 0.2 * w) / (1 - 0.999**t)
        torch.testing.assert_close(
            weight.detach(), theta - 0.05 * m / (1 - 0.9**t) / (seen.sqrt() + 1e-8)
        )


def test_a_filter_that_changes_the_variance_is_refused() -> None:
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), filter=Exponential())
    with pytest.raises(ArgumentError, match="the oracle's filter changes"):
        AdamBC(oracle.model.parameters(), oracle)
