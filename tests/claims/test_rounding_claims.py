"""Rounding: what float32 adds to the sensitivity is bounded, and secure noise allows for it."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpbam import BAM, Compute, FlatClipping, PrivateGradientOracle, mechanism, scratch
from dpbam.catalogue import CLIPPINGS
from dpbam.engines.fused import gradients
from dpbam.privacy import secure_noise
from dpbam.privacy.clipping import ROUNDING
from dpbam.privacy.randomness import SecureRandomness
from dpbam.privacy.secure_noise import SecureGaussianNoise, grid
from planting import Mistake, catches
from support import clipped_sum, quiet_plan

UNITS, C = 65_536, 0.7
UNITS_BELOW = 1024  # where a number of units could decide
ENGINES = ["functional", "fused"]  # those that add several units in float32


def moves(
    engine: str, physical: int, width: int = 1, model: nn.Module | None = None, **options: Any
) -> list[float]:
    """How far the sum of 65,536 aligned gradients of norm C moves without one of them.

    The gradient of a unit is its input. All are clipped, so exact sums move by C; the first unit
    to go shifts all others to other places in their physical batches.
    """
    torch.manual_seed(0)
    plan = quiet_plan(C, n=UNITS, batch_size=UNITS)
    private = PrivateGradientOracle(
        nn.Linear(width, 1, bias=False) if model is None else model, first_output, plan,
        compute=Compute(engine=engine, physical_batch_size=physical), **options,
    )  # fmt: skip
    x = (torch.rand(width) + 0.5) * (1 + torch.rand(UNITS, 1))
    y = torch.zeros(UNITS)
    whole = clipped_sum(private, x, y)
    return [
        float((whole - clipped_sum(private, x[kept], y[kept])).norm())
        for kept in (slice(1, None), slice(0, -1))
    ]


def first_output(output: Tensor, targets: Tensor) -> Tensor:
    return output[:, 0]


def check_moves(engine: str, physical: int, width: int = 1, **options: Any) -> None:
    """C (1 +- 2^-11): more is a broken promise, less is the same rounding in the other direction.

    With one coordinate any float32 sum fails: at 65,536 C = 45,875 float32 is spaced by 2^-8, and
    C = 0.7 lies 0.2 of a spacing, 1.1e-3 C, from the nearest multiple.
    """
    for moved in moves(engine, physical, width, **options):
        assert abs(moved / C - 1) <= ROUNDING, f"moves by C (1 + {moved / C - 1:.2g})"


def check_many_physical_batches() -> None:
    check_moves("functional", 4096)


def check_one_physical_batch() -> None:
    check_moves("functional", UNITS)


class OneOfFloat64(nn.Module):
    """A float32 weight next to a float64 one, which makes norms and factors float64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.other = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + 0 * self.other.float()


class Float64Factors(FlatClipping):
    """A clipping of the user's own that computes in float64."""

    def factors(self, norms: Tensor) -> Tensor:
        return super().factors(norms.double())


def check_factors_of_float64() -> None:
    """The engine adds in the dtype of the directions, whatever that of the factors."""
    check_moves("functional", UNITS, model=OneOfFloat64())
    check_moves("functional", UNITS, clipping=Float64Factors(C))


def test_factors_of_float64() -> None:
    check_factors_of_float64()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("physical", [pytest.param(1024, marks=pytest.mark.slow), 8192, UNITS])
def test_one_of_65536_aligned_gradients_moves_the_sum_by_C(engine: str, physical: int) -> None:
    check_moves(engine, physical)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("physical", "width"), [(64, 8), (512, 8), (1024, 8), (4096, 32)])
def test_one_wide_gradient_moves_the_sum_by_C(engine: str, physical: int, width: int) -> None:
    check_moves(engine, physical, width)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_sums_are_float64_and_gradients_have_the_dtype_of_their_parameter(
    dtype: torch.dtype,
) -> None:
    model = nn.Linear(3, 1, bias=False).to(dtype)
    private = PrivateGradientOracle(
        model,
        first_output,
        quiet_plan(C),
        compute=Compute(engine="functional", physical_batch_size=2),
    )
    summed = clipped_sum(private, torch.ones(5, 3, dtype=dtype), torch.zeros(5))
    private.backward(torch.ones(5, 3, dtype=dtype), torch.zeros(5))
    assert summed.dtype == torch.float64
    assert float(summed.norm()) == pytest.approx(5 * C, rel=1e-3)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == dtype


# --- one record does not change how the others round


def moved_by_a_record(record: Tensor, units: int, dtype: torch.dtype, *, autocast: bool) -> float:
    """How far, in C, the sum of BAM's directions moves when a record is added."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    ).to(dtype)
    compute = Compute(engine="fused", physical_batch_size=4096)
    private = PrivateGradientOracle(
        model, nn.CrossEntropyLoss(reduction="none"), quiet_plan(C), BAM(0.1), compute=compute
    )
    rows = torch.randn(1, 64) + 0.3 * torch.randn(units, 64)  # alike, so that rounding adds up
    x = torch.cat([rows, record[None]]).to(dtype)
    y = torch.full((units + 1,), 3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        sums = [clipped_sum(private, x[:count], y[:count]) for count in (units, units + 1)]
    return float((sums[1] - sums[0]).norm()) / C


def check_a_bad_record_leaves_the_others(
    dtype: torch.dtype = torch.bfloat16, *, autocast: bool = False
) -> None:
    """A record that is not a number counts as zero: the sum is the same, bit for bit."""
    bad = torch.full((64,), torch.nan)
    assert moved_by_a_record(bad, 256, dtype, autocast=autocast) == 0


def check_one_unit_more_leaves_the_others() -> None:
    """Nor does the number of units decide how: the sum moves by C at most, and its rounding."""
    record = torch.randn(64, generator=torch.Generator().manual_seed(1))
    moved = moved_by_a_record(record, UNITS_BELOW, torch.bfloat16, autocast=False)
    assert moved <= 1 + ROUNDING, f"moves by {moved:.4g} C"


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float32, True),
        (torch.float32, False),
    ],
)
def test_a_record_that_is_not_a_number_leaves_the_others_bit_for_bit(
    dtype: torch.dtype, autocast: bool
) -> None:
    check_a_bad_record_leaves_the_others(dtype, autocast=autocast)


# --- secure noise's allowance


class Words(SecureRandomness):
    """Stands in for the generator: every word is the same, and every further bit 0."""

    def __init__(self, word: int) -> None:
        super().__init__()
        self.word = word

    def words(self, count: int) -> np.ndarray:
        return np.full(count, self.word, dtype=np.uint64)

    def raw(self, count: int) -> bytes:
        return bytes(count)


def drawn(word: int, sums: Tensor, std: float) -> Tensor:
    return SecureGaussianNoise(Words(word)).add({"w": sums}, std, 0)["w"]


def at(deviations: float) -> int:
    """The word whose draw is that many standard deviations."""
    return int(NormalDist().cdf(-deviations) * 2.0**64) << 1


def check_allowance(sigmas: tuple[float, ...] = (1.0,)) -> None:
    """Noise over sensitivity is sigma at least, in the worst case of clips and of sums.

    Clips: the largest of 1000 norms. Sums: the bound that the tests above hold them to.
    """
    norms = torch.linspace(1, 9, 1000)[None]
    clipped = max(
        float((kind(C).factors(norms) * norms).max()) for kind in map(CLIPPINGS.load, CLIPPINGS)
    )
    most = max(clipped, C * (1 + ROUNDING))
    for sigma in sigmas:
        std = sigma * C
        scale = float(drawn(at(1.0), torch.zeros(1, dtype=torch.float64), std)) + grid(std)
        assert scale >= sigma * most, f"sigma {sigma:g} is {scale / most:.6g} in truth"


def check_sums_are_not_rounded_before_the_noise(sigma: float) -> None:
    """The cell that s + noise falls into is that of the exact sum, at every sigma.

    Two sums a hundredth of a cell apart, on two sides of a cell's edge. If they were rounded first,
    they would be a cell apart in each of d coordinates, whatever the noise, and that is more than C
    from some sigma on. Rounded after it, they differ only where the edge falls between them.
    """
    std, many = sigma * C, 4096
    spacing = grid(std)
    pair = [torch.full((many,), (0.5 + e) * spacing, dtype=torch.float64) for e in (-5e-3, 5e-3)]
    words = np.random.default_rng(0).integers(0, 2**64, many, dtype=np.uint64)
    source = Words(0)
    source.words = lambda count: words  # type: ignore[method-assign]
    below, above = (SecureGaussianNoise(source).add({"w": s}, std, 0)["w"] for s in pair)
    cells = (above - below) / spacing
    assert set(cells.tolist()) <= {0.0, 1.0}
    assert 0 < float(cells.mean()) < 0.02  # one in a hundred; seeded


@pytest.mark.parametrize("sigma", [1.0, 255.0, 257.0, 1e4, 1e8])
def test_secure_noise_holds_at_every_sigma(sigma: float) -> None:
    check_allowance((sigma,))
    check_sums_are_not_rounded_before_the_noise(sigma)


def check_large_sigma() -> None:
    check_sums_are_not_rounded_before_the_noise(1e4)


# --- the mistakes


def in_float32(original):
    return lambda tree: {name: t.float() for name, t in original(tree).items()}


def in_one_portion(original):
    return lambda factors: iter([(factors, slice(0, factors.shape[1]))])


def in_portions_of_float32(original):
    return lambda factors: (
        iter([(factors, slice(0, factors.shape[1]))])
        if factors.dtype == torch.float64
        else original(factors)
    )


def none(original):
    return lambda std: std


def without_its_way(original):
    """A norm that was repaired forgets that the others were computed by Gram matrices."""

    def recompute(norm, sizes, of_units):
        return replace(original(norm, sizes, of_units), by_gram=False)

    return recompute


def by_all_units(original):
    """Gram matrices as long as those of all units are within some limit."""
    return lambda self, purpose: original(self, purpose) and len(self.pairs[0][1]) <= UNITS_BELOW


def rounded_first(original):
    return lambda self, s, spacing, deviation: original(
        self, (s / spacing).round() * spacing, spacing, deviation
    )


MISTAKES = {
    "physical batches added in float32": Mistake(
        check_many_physical_batches, scratch, "sum_of_none", in_float32
    ),
    "65,536 units added in float32": Mistake(
        check_one_physical_batch, mechanism, "portions", in_one_portion
    ),
    "65,536 units of float64 factors added in float32": Mistake(
        check_factors_of_float64, mechanism, "portions", in_portions_of_float32
    ),
    "a repaired record sends the others another way": Mistake(
        check_a_bad_record_leaves_the_others, gradients, "recompute_cancelling", without_its_way
    ),
    "the number of units chooses how they round": Mistake(
        check_one_unit_more_leaves_the_others, gradients.Factored, "prefers_gram", by_all_units
    ),
    "a secure-noise allowance of zero": Mistake(check_allowance, secure_noise, "raised", none),
    "a sum rounded before its noise": Mistake(
        check_large_sigma, SecureGaussianNoise, "_one", rounded_first
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
