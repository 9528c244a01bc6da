"""Noise, closely: its scale to 2%, its tails, and parameters of one element; standard and secure.

Fast noise is seeded here. Secure noise cannot be, outside of pytest: its checks fail by chance with
the probability of ``check_normal``, 3e-10, once for the matrix and once for each of three shapes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from checks import check_beyond, check_normal
from dpbam import Compute, PrivateGradientOracle
from dpbam.privacy import noise as noise_module
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness
from dpbam.privacy.secure_noise import SecureGaussianNoise, make_noise
from planting import Mistake, catches
from support import cross_entropy, private_plan

SIGMA, C, L = 2.0, 0.5, 10
STD = {"standard": SIGMA * C, "secure": SIGMA * C * (1 + 2.0**-10)}  # with secure noise's allowance
SHAPES: dict[str, tuple[int, ...]] = {"scalar": (), "vector": (1,), "matrix": (1, 1)}
EACH = 60  # parameters of each of these shapes


class ManyScalars(nn.Module):
    """A matrix of 200,000 elements, and parameters of one; without gradients on inputs of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(2, 100_000))
        self.ones = nn.ParameterDict(
            {f"{kind}{k}": nn.Parameter(torch.zeros(shape))
             for kind, shape in SHAPES.items() for k in range(EACH)}
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.stack([p.reshape(()) for p in self.ones.values()]).sum()
        return x @ self.matrix[:, :4].T * scale


def released(kind: str) -> dict[str, torch.Tensor]:
    """One step without gradients, times l: the noise of each parameter."""
    model, plan = ManyScalars(), private_plan(noise_multiplier=SIGMA, clip_norm=C, batch_size=L)
    oracle = PrivateGradientOracle(
        model, cross_entropy, plan, noise=kind, seed=7 if kind == "standard" else None,
        compute=Compute(engine="functional", physical_batch_size=4), sampling="poisson-elsewhere",
    )  # fmt: skip
    oracle.backward(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    return {n: p.grad.flatten().double() * L for n, p in model.named_parameters()}


def check_scale_and_tails(kind: str) -> None:
    check_normal(released(kind)["matrix"].numpy(), STD[kind])


def check_far_tails() -> None:
    """Of 2^25 draws, 32 are expected beyond 4.9; none has a probability of 1e-14."""
    noise, zeros = GaussianNoise(Randomness(7)), {"w": torch.zeros(2**20, dtype=torch.float64)}
    sizes = np.concatenate([noise.add(zeros, 1.0, step)["w"].abs().numpy() for step in range(32)])
    for edge in (4.0, 4.5, 4.9):
        check_beyond(sizes, edge)


def test_far_tails() -> None:
    check_far_tails()


def check_one_element_parameters(kind: str) -> None:
    """Every shape of one element has noise of full scale, each parameter its own.

    On the secure grid of 2^20 cells a deviation two of 60 draws are equal in 5e-4 of all runs, and
    four such pairs occur in 2e-15.
    """
    noise = released(kind)
    for shape in SHAPES:
        draws = torch.cat([d for n, d in noise.items() if n.startswith(f"ones.{shape}")])
        assert len(draws.unique()) > EACH - 4
        check_normal(draws.numpy(), STD[kind])


def of(kind: str, check):
    def noise_of_this_kind() -> None:
        check(kind)

    noise_of_this_kind.__name__ = check.__name__
    return noise_of_this_kind


@pytest.mark.parametrize("kind", STD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_the_shape_and_dtype_of_the_sum(kind: str, dtype: torch.dtype) -> None:
    shapes = [(), (1,), (1, 1), (0,), (3, 0), (2, 3)]
    sums = {str(shape): torch.zeros(shape, dtype=dtype) for shape in shapes}
    out = make_noise(kind, None).add(sums, 1.0, 0)
    assert {n: (t.shape, t.dtype) for n, t in out.items()} == {
        n: (t.shape, t.dtype) for n, t in sums.items()
    }
    assert all(bool((t != 0).all()) for t in out.values())


# --- the mistakes


def at_98_hundredths(original):
    return lambda self, sums, std, step, **more: original(self, sums, 0.98 * std, step, **more)


def cut_off_at_3_sigma(original):
    def add(self, sums, std, step, **more):
        zeros = {n: torch.zeros_like(s) for n, s in sums.items()}
        noise = original(self, zeros, std, step, **more)
        return {n: s + noise[n].clamp(-3 * std, 3 * std) for n, s in sums.items()}

    return add


def not_on_one_element(original):
    def add(self, sums, std, step, **more):
        raw = {n: s.clone() for n, s in sums.items()}  # noise may be written over it
        noised = original(self, sums, std, step, **more)
        return {n: s if s.numel() == 1 else noised[n] for n, s in raw.items()}

    return add


def a_radius_of(bits: int):
    """Fewer bits for the radius of two draws: of 16, it ends at 4.7 standard deviations."""

    def wrong(original):
        class Fewer:
            def __init__(self, source):
                self._source = source

            def random_raw(self, count):
                words = self._source.random_raw(count)
                radii = words.view(np.uint32)[: count // 2]
                radii &= np.uint32(2**32 - 2 ** (32 - bits))
                radii |= np.uint32(2 ** (32 - bits))
                return words

        return lambda source, count: original(Fewer(source), count)

    return wrong


PLANTED = {
    "at 0.98 of its scale": (check_scale_and_tails, at_98_hundredths),
    "cut off at 3 sigma": (check_scale_and_tails, cut_off_at_3_sigma),
    "none on one-element parameters": (check_one_element_parameters, not_on_one_element),
}
MISTAKES = {
    f"{name} ({kind})": Mistake(of(kind, check), owner, "add", wrong)
    for name, (check, wrong) in PLANTED.items()
    for kind, owner in {"standard": GaussianNoise, "secure": SecureGaussianNoise}.items()
} | {
    "a radius of 16 bits (standard)": Mistake(
        check_far_tails, noise_module, "standard_normals", a_radius_of(16)
    )
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
