"""Adding one unit, whatever it holds, moves the un-noised sum by at most C."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbam import BAM, DPSGD, mechanism, params
from dpbam.batches import LogicalBatch
from dpbam.contenders.clippings import (
    NormalisedClipping,
    PSACClipping,
    QuantileClipping,
    SlackClipping,
)
from dpbam.contenders.disk import DiSK
from dpbam.engines import materialised
from dpbam.engines.fused import engine as fused_engine
from dpbam.errors import PlanViolationError
from dpbam.privacy.clipping import AutomaticClipping, PerLayerClipping, bound_factors
from planting import Mistake, catches
from support import (
    CLIPPINGS,
    METHODS,
    SERVED,
    cross_entropy,
    flat,
    gradients,
    in_turn,
    quiet_plan,
    released_before,
    sized_oracle,
)

C, L = 0.5, 10
KINDS = [*CLIPPINGS, "normalised", "psac", "quantile", "slaclip"]
AHEAD = {
    "disk": lambda lam: DiSK(inner=BAM(lam)),
    "disk, two gradients": lambda lam: DiSK(kappa=0.3, gamma=0.1),  # 23 times one, -22 the other
}
value = st.one_of(
    st.floats(-3, 3),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([1e15, 1e77, -1e150, 1e308, float("nan"), float("inf"), 0.0]),
)
row = st.lists(value, min_size=3, max_size=3)


class Neighbours:
    """One oracle, asked for the sum of a batch with and without one more unit.

    The sum is all that the step releases: also the clipping's extra coordinates.
    """

    def __init__(self, engine: str, method: str, clipping: str, records: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(3, 4), nn.SiLU(), nn.Dropout(0.2), nn.Linear(4, 2)
        ).double()
        group = {"unit": "patient", "max_records": records} if records > 1 else {}
        plan = quiet_plan(C, clipping=clipping, **group)
        self.oracle = sized_oracle(
            self.model, cross_entropy, plan, (METHODS | AHEAD)[method](0.3), engine=engine
        )
        self.extra: list[Tensor] = []
        if self.oracle.clipping.coordinates:
            self.oracle.clipping.update = self.extra.append  # and C stays as it is

    def sum(self, rows: list[list[float]], units: list[int]) -> Tensor:
        """l times the gradient at step 1: the clipped sum, DP-SAT's ascent included."""
        x = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
        ones = {n: torch.ones_like(p) for n, p in self.model.named_parameters()}
        parts = released_before(self.oracle, ones, ahead=0.1)
        self.oracle.load_state_dict({"step": 1, "parts": parts})
        self.oracle.backward(x, torch.arange(len(x)) % 2, torch.tensor(units, dtype=torch.long))
        return torch.cat([flat(gradients(self.model)), *self.extra[-1:]]) * L

    def check(self, others: list[list[float]], added: list[list[float]], at: int) -> None:
        units = list(range(0, 2 * len(others), 2))
        without = self.sum(others, units)
        moved = (self.sum(others + added, units + [2 * at - 1] * len(added)) - without).norm()
        assert float(moved) <= C * (1 + 1e-5), f"moved by {float(moved)}"


@pytest.mark.parametrize(
    ("engine", "method", "clipping", "records"),
    in_turn([*SERVED, *(("functional", name) for name in AHEAD)], KINDS, [1, 3]),
)
def test_one_unit_moves_the_sum_by_at_most_c(
    engine: str, method: str, clipping: str, records: int
) -> None:
    neighbours = Neighbours(engine, method, clipping, records)

    @settings(max_examples=12)
    @given(
        others=st.lists(row, max_size=3),
        added=st.lists(row, min_size=1, max_size=records),
        at=st.integers(0, 3),
    )
    def run(others: list[list[float]], added: list[list[float]], at: int) -> None:
        neighbours.check(others, added, at)

    run()


@pytest.mark.parametrize(("engine", "method", "clipping"), in_turn(SERVED, CLIPPINGS))
def test_an_input_near_overflow_counts_or_not_whatever_the_others_are(
    engine: str, method: str, clipping: str
) -> None:
    """Two rows more make the batch another shape, and the fused engine choose another way."""
    neighbours = Neighbours(engine, method, clipping, 3)
    for x in (1e76, 1.35e154, 1e200):
        neighbours.check([[x, 0.0, 0.0], [0.0] * 3], [[0.0] * 3] * 2, 0)


# --- the same check on planted mistakes

LOUD = [[30.0, -20.0, 10.0]]
OFTEN = [LOUD] * 8  # a new oracle draws dropout anew; one draw in forty hides a mistake
USUAL = [[0.3, -0.2, 0.9], [1.0, 0.5, -0.4]]


def check_of(method: str, records: int = 1, *added: list[list[float]]):
    def sum_on_neighbouring_batches() -> None:
        for rows in added:
            Neighbours("functional", method, "flat", records).check(USUAL, rows, 1)

    return sum_on_neighbouring_batches


def check_a_row_is_alone_in_the_fused_engine() -> None:
    """A large record moves the sum by C at most, with others in the same pass."""
    for added in OFTEN:
        Neighbours("fused", "bam", "flat", 1).check(USUAL, added, 1)


def parts_of(clipping: str):
    """A step on neighbours; the oracle's own check of the joint norm counts as a failure."""

    def sum_on_neighbouring_batches() -> None:
        try:
            Neighbours("functional", "dp-sgd", clipping, 1).check(USUAL, LOUD, 1)
            Neighbours("functional", "dp-sgd", clipping, 1).check(USUAL, [[0.01, 0.0, 0.0]], 1)
        except PlanViolationError as refused:
            raise AssertionError(str(refused)) from None

    return sum_on_neighbouring_batches


def factor_times_nan(original):
    """0 * NaN is NaN: behind the oracle's check of the factors, which are right."""
    return lambda self, factors, span=None: original(
        self, torch.where(factors == 0, torch.nan, factors)
    )


def clips_what_it_does_not_sum(original):
    """Factors from the plain gradient, the perturbed one summed."""

    def clipped_sums(step):
        queries, total = original(step), params.zeros(step.theta)
        with params.shifted(step.theta, step.shift):
            for physical in step.computation.physical(step.batch):
                plain = step.computation.directions(physical, DPSGD(), 0.0).norms()
                perturbed = step.computation.directions(physical, step.method, step.lam)
                factors, _ = step.clipping.clip(plain)
                for name, part in perturbed.weighted_sum(factors).items():
                    total[name] += part
        return {**queries, "gradient": replace(queries["gradient"], sums=total)}

    return clipped_sums


def one_norm_a_parameter(original):
    """Every parameter clipped to C by itself: the whole may reach C sqrt(parameters)."""

    def weighted_sum(self, factors, span=None):
        own = {n: materialised._rows(d).norm(dim=1) for n, d in self._d.items()}
        return {
            n: materialised._contract((C / own[n]).clamp(max=1), d, some_removed=False)
            for n, d in self._d.items()
        }

    return weighted_sum


def every_record_a_unit(original):
    def of(inputs, targets, units, max_records):
        return original(inputs, targets, None, max_records)

    return staticmethod(of)


def no_clipping(original):
    return lambda self, factors, span=None: original(self, torch.ones_like(factors))


def batch_mean_removed(original):
    """A direction that depends on the other samples too."""

    def weighted_sum(self, factors, span=None):
        mean = {n: d.mean(0) for n, d in self._d.items()}
        return {n: t - len(d) * 3 * mean[n] for (n, t), d in
                zip(original(self, factors).items(), self._d.values(), strict=True)}  # fmt: skip

    return weighted_sum


def rows_less_their_mean(original):
    """What a pass would see of a row, if it were not alone in its batch."""

    def alone(batch):
        return original(
            params.map_rows(lambda t: t - t.mean(0) if t.is_floating_point() else t, batch)
        )

    return alone


BAD = [[[float("nan")] * 3], [[float("inf"), 0.0, 0.0]]]
RECORDS = [[30.0, -20.0, 10.0], [25.0, -25.0, 12.0], [28.0, -22.0, 9.0]]
Directions = materialised.MaterialisedDirections
MISTAKES = {
    "no clipping": Mistake(check_of("dp-sgd", 1, *OFTEN), Directions, "weighted_sum", no_clipping),
    "a factor of 0 times NaN": Mistake(
        check_of("dp-sgd", 1, *BAD), Directions, "weighted_sum", factor_times_nan
    ),
    "the plain gradient clipped, the perturbed one summed": Mistake(
        check_of("bam", 1, [[0.5, 0.1, -0.3]], [[0.0, 0.01, 0.0]], USUAL[:1], USUAL[1:]),
        mechanism,
        "clipped_sums",
        clips_what_it_does_not_sum,
    ),
    "each parameter clipped to C": Mistake(
        check_of("dp-sgd", 1, *OFTEN), Directions, "weighted_sum", one_norm_a_parameter
    ),
    "each record of a group clipped to C": Mistake(
        check_of("dp-sgd", 3, *[RECORDS] * 8),
        LogicalBatch,
        "of",
        every_record_a_unit,
    ),
    "automatic clipping without gamma, and C too large": Mistake(
        parts_of("automatic"),
        AutomaticClipping,
        "scales",
        lambda original: lambda s, n: 2 * s.clip_norm / n.clamp(min=s.gamma),
    ),
    "each layer clipped to C": Mistake(
        parts_of("per-layer"),
        PerLayerClipping,
        "scales",
        lambda original: lambda s, n: bound_factors(n, s.clip_norm),
    ),
    "DiSK's two gradients summed, the first one clipped": Mistake(
        check_of("disk, two gradients", 1, *[[[2.0] * 3], [[-2.0] * 3]] * 4),  # as OFTEN
        mechanism,
        "clipped_sums",
        clips_what_it_does_not_sum,
    ),
    "a norm without the regulariser, and C too large": Mistake(
        parts_of("psac"), PSACClipping, "scales", lambda original: lambda s, n: 2 * original(s, n)
    ),
    "a normalised gradient that keeps its length": Mistake(
        parts_of("normalised"),
        NormalisedClipping,
        "scales",
        lambda original: lambda s, n: torch.ones_like(n),
    ),
    "the bit of the quantile outside the sensitivity": Mistake(
        parts_of("quantile"),
        QuantileClipping,
        "bound",
        lambda original: property(lambda s: s.sensitivity),
    ),
    "a slack of C for every unit": Mistake(
        parts_of("slaclip"),
        SlackClipping,
        "extra",
        lambda original: lambda s, n, f: torch.full((s.coordinates, n.shape[1]), s.bound),
    ),
    "a sum that looks at the other samples": Mistake(
        check_of("bam", 1, *OFTEN), Directions, "weighted_sum", batch_mean_removed
    ),
    "a pass that looks at the other samples": Mistake(
        check_a_row_is_alone_in_the_fused_engine, fused_engine, "alone", rows_less_their_mean
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(100_000))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sum(-1, keepdim=True)


def check_a_norm_that_float32_cannot_hold_is_not_raised() -> None:
    """The squares of nearly all entries vanish: the true norm is larger than the computed one."""
    phi = 1e-10
    plan = quiet_plan(1.0, clipping="normalised", clip_schedule=(phi,))
    oracle = sized_oracle(Weights(), lambda out, t: out[:, 0], plan, DPSGD())
    x = torch.full((1, 100_000), 2.5e-23)
    x[0, 0] = 1.1e-20
    oracle.backward(x, torch.zeros(1))
    moved = float(flat(gradients(oracle.model)).double().norm()) * L
    assert moved <= phi * (1 + 1e-5), f"moved by {moved / phi} C"


def test_norms_that_float32_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_norm_that_float32_cannot_hold_is_not_raised()
    monkeypatch.setattr("dpbam.privacy.clipping.LEAST_NORM", 0.0)
    with pytest.raises(AssertionError, match="moved by"):
        check_a_norm_that_float32_cannot_hold_is_not_raised()
