"""What the oracle's checks refuse, at exactly which size, run and norm; and what they let pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from dpbam import AutomaticClipping, Clipping, FlatClipping, PerLayerClipping, PrivacyPlan
from dpbam.errors import PlanViolationError
from dpbam.privacy.clipping import check_factors, measure
from dpbam.privacy.sampling import (
    LEAST_RUN,
    LEAST_TAIL,
    BatchSizes,
    probability,
    two_sided_tail,
)

PLANS = [(2, 1), (100, 1), (100, 10), (100, 99), (1437, 512), (50_000, 4096)]


def sizes_of(n: int, batch_size: int) -> BatchSizes:
    return BatchSizes(n, batch_size)


def refused(sizes: BatchSizes, size: int) -> bool:
    try:
        sizes.check(size)
    except PlanViolationError:
        return True
    return False


# --- the binomial distribution


def exact(k: int, m: int, q: Fraction) -> Fraction:
    return math.comb(m, k) * q**k * (1 - q) ** (m - k)


@pytest.mark.parametrize(
    ("m", "q"), [(7, Fraction(1, 2)), (60, Fraction(1, 5)), (90, Fraction(9, 10))]
)
def test_probabilities_and_tails_are_those_of_exact_fractions(m: int, q: Fraction) -> None:
    for k in range(m + 1):
        found, rate = [exact(j, m, q) for j in range(m + 1)], float(q)
        tail = min(1.0, 2 * min(float(sum(found[: k + 1])), float(sum(found[k:]))))
        assert probability(k, m, rate) == pytest.approx(float(found[k]), rel=1e-9)
        assert two_sided_tail(k, m, rate) == pytest.approx(tail, rel=1e-9)
    assert probability(m + 1, m, float(q)) == two_sided_tail(m + 1, m, float(q)) == 0.0


# --- sizes


@pytest.mark.parametrize(("n", "batch_size"), PLANS)
def test_a_size_is_refused_only_if_impossible_under_all_three_numbers_of_units(n, batch_size):
    """Every size near the edges, by scipy's own distribution."""
    from scipy.stats import binom

    sizes, rate = sizes_of(n, batch_size), batch_size / n
    spread = 12 * math.sqrt(batch_size) + 60
    low, high = max(0, int(batch_size - spread)), int(batch_size + spread)
    k = np.arange(low, high)
    tails = [2 * np.minimum(binom.cdf(k, m, rate), binom.sf(k - 1, m, rate))
             for m in (n - 1, n, n + 1)]  # fmt: skip
    expected = np.maximum.reduce(tails) < LEAST_TAIL
    assert [refused(sizes, int(size)) for size in k] == expected.tolist()
    assert not expected[batch_size - low]
    assert batch_size < 10 or expected[-1]


def test_a_size_that_one_unit_more_makes_possible_passes() -> None:
    sizes = sizes_of(100, 99)
    assert not refused(sizes, 101)  # n + 1 units, all drawn
    assert refused(sizes, 102)


def test_ten_times_the_expected_size_is_refused_in_one_sentence() -> None:
    words = r"the batch has 200 units, but .* 20 \+- 4\.4 of n = 1000.*oracle\.batches\(dataset\)"
    with pytest.raises(PlanViolationError, match=words):
        sizes_of(1000, 20).check(200)


@pytest.mark.parametrize("size", [0, 4, 8, 60])
def test_a_full_batch_has_n_units_or_one_more_or_less(size: int) -> None:
    sizes = sizes_of(6, 6)
    for _ in range(100):  # equal sizes are what a full batch has
        for right in (5, 6, 7, 6):
            sizes.check(right)
            sizes.count(right)
    with pytest.raises(PlanViolationError, match=f"has {size} units, but .* whole data set, n = 6"):
        sizes.check(size)


# --- runs of equal sizes


@pytest.mark.parametrize(("n", "batch_size"), PLANS)
def test_a_run_is_refused_where_its_probability_falls_below_the_limit(n, batch_size):
    for size in {batch_size, max(0, batch_size - 2), batch_size + 1}:
        sizes, rate = sizes_of(n, batch_size), batch_size / n
        likely = max(probability(size, m, rate) for m in (n - 1, n, n + 1))
        allowed = math.floor(math.log(LEAST_RUN) / math.log(likely)) + 1
        assert likely <= 0.5
        for _ in range(allowed):
            assert not refused(sizes, size)
            sizes.count(size)
        with pytest.raises(PlanViolationError, match=f"{allowed + 1} batches in a row have {size}"):
            sizes.check(size)
        other = size - 1 if size else 1
        sizes.count(other)  # another size ends the run
        assert not refused(sizes, size)


def test_the_steps_that_the_documentation_names() -> None:
    """At its 41st step at the latest, and at 4096 of 50,000 units at its 7th."""
    for (n, batch_size), step in {(2, 1): 41, (50_000, 4096): 7}.items():
        sizes = sizes_of(n, batch_size)
        for _ in range(step - 1):
            sizes.check(batch_size)
            sizes.count(batch_size)
        assert refused(sizes, batch_size)


@pytest.mark.parametrize("change", [-1, 0, 1])
@pytest.mark.parametrize(("n", "batch_size"), PLANS)
def test_poisson_batches_pass(n: int, batch_size: int, change: int) -> None:
    """3000 steps of each, seeded: of the plan's data set and of both kinds of neighbour."""
    sizes = sizes_of(n, batch_size)
    for size in np.random.default_rng(n).binomial(n + change, batch_size / n, 3000).tolist():
        sizes.check(size)
        sizes.count(size)


def test_the_plans_own_sampler_passes() -> None:
    plan = PrivacyPlan(n=300, batch_size=30, steps=3000, noise_multiplier=1.0, delta=1e-4)
    sizes = BatchSizes(plan.n, plan.batch_size)
    for indices in plan.sampler(seed=0):
        sizes.check(len(indices))
        sizes.count(len(indices))


# --- clipping factors


def norms_of(*groups: list[float]) -> Tensor:
    return torch.tensor(groups)


def automatic(bound: float) -> AutomaticClipping:
    """With the default gamma, or the least that is allowed at this bound."""
    return AutomaticClipping(bound, gamma=max(0.01, 1e-6 * bound))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [FlatClipping, automatic, PerLayerClipping])
def test_the_librarys_clippings_pass(make: Callable[[float], Clipping], dtype: torch.dtype) -> None:
    """Per layer over 300 groups; also with norms that are zero, huge, infinite or NaN."""
    generator = torch.Generator().manual_seed(0)
    groups = 300 if make is PerLayerClipping else 1
    norms = torch.exp(4 * torch.randn(groups, 50, generator=generator)).to(dtype)
    norms[0, :4] = torch.tensor([0.0, 1e18, math.inf, math.nan])
    for bound in (1e-8, 1.0, 1e6):
        clipping = make(bound)
        check(clipping, norms, clipping.factors(norms))
    check(FlatClipping(math.inf), norms, FlatClipping(math.inf).factors(norms))
    check(make(1.0), norms[:, :0], norms[:, :0])  # an empty batch
    check_factors(make(1.0), 1.0, [])  # an empty logical batch


def check(clipping: Clipping, norms: Tensor, factors: Tensor) -> None:
    bound = clipping.sensitivity
    check_factors(clipping, bound, [measure(clipping, norms, factors).tolist()])


@pytest.mark.parametrize(
    ("norms", "factors", "words"),
    [
        (norms_of([0.5, 4.0]), norms_of([1.0, 1.0]), "lets a unit through with norm 4, above"),
        (norms_of([0.5, 2.0]), norms_of([1.0, 0.500001]), "with norm 1, above"),
        (norms_of([0.8], [0.8]), norms_of([1.0], [1.0]), "with norm 1.13137"),
        (norms_of([0.5]), norms_of([-1.0]), "a factor that is negative"),
        (norms_of([0.5]), norms_of([math.nan]), "not finite"),
        (norms_of([0.0]), norms_of([math.inf]), "not finite"),
        (norms_of([math.inf]), norms_of([1e-30]), "not 0 for a norm that is not finite"),
        (norms_of([math.nan]), norms_of([0.5]), "not 0 for a norm that is not finite"),
        (norms_of([0.1], [math.nan]), norms_of([1.0], [1.0]), "not 0 for a norm"),
        (norms_of([0.5, 0.5]), norms_of([1.0]), r"shape \(1, 1\) for norms of shape \(1, 2\)"),
    ],
)  # fmt: skip
def test_factors_beyond_the_sensitivity_are_refused(norms, factors, words) -> None:
    with pytest.raises(PlanViolationError, match=f"^FlatClipping .*{words}"):
        check(FlatClipping(1.0), norms, factors)


@pytest.mark.parametrize("place", range(3))
def test_one_physical_batch_beyond_the_sensitivity_is_enough_to_refuse(place: int) -> None:
    flat = FlatClipping(1.0)
    measured = [measure(flat, norms_of([0.5]), norms_of([1.0])).tolist() for _ in range(3)]
    check_factors(flat, 1.0, measured)
    measured[place] = measure(flat, norms_of([0.5, 4.0]), norms_of([1.0, 1.0])).tolist()
    with pytest.raises(PlanViolationError, match="with norm 4, above"):
        check_factors(flat, 1.0, measured)


def test_rounding_of_one_millionth_passes() -> None:
    """The negative control is 0.500001 above: 1.000002."""
    check(FlatClipping(1.0), norms_of([2.0]).double(), norms_of([0.5]).double() * (1 + 9e-7))
