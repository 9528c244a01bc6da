"""The methods' formulas on functions whose derivatives are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpbam.contenders.disk import DiSK
from dpbam.methods import (
    BAM,
    DPSAT,
    DPSGD,
    SAM,
    SGD,
    SHARE,
    Ascended,
    Method,
    Penalised,
    Relative,
    WarmUp,
    form_of,
)
from dpbam.params import Params

H = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
THETA = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}


def quadratic(theta: Params) -> Params:
    """L = w^T H w / 2: the gradient is H w and the Hessian H."""
    return {"w": H @ theta["w"]}


def unit(v: Tensor) -> Tensor:
    return v / v.norm()


def test_dp_sgd_is_the_gradient() -> None:
    assert torch.equal(DPSGD().direction(quadratic, THETA, 0.0)["w"], H @ THETA["w"])


@pytest.mark.parametrize("exact", [False, True])
def test_bam_on_a_quadratic(exact: bool) -> None:
    """g + lambda H u: both variants are exact where the Hessian is constant."""
    g = H @ THETA["w"]
    found = BAM(0.3, exact=exact).direction(quadratic, THETA, 0.3)["w"]
    assert torch.allclose(found, g + 0.3 * H @ unit(g), atol=1e-14)


@pytest.mark.parametrize("exact", [False, True])
def test_bam_does_not_perturb_a_zero_gradient(exact: bool) -> None:
    zero = {"w": torch.zeros(2, dtype=torch.float64)}
    assert torch.equal(BAM(0.3, exact=exact).direction(quadratic, zero, 0.3)["w"], zero["w"])


def test_dp_sat_ascends_along_the_previous_private_gradient() -> None:
    previous = {"w": torch.tensor([3.0, 4.0])}
    shift = DPSAT(0.5).ascent(0.5, previous, _forbidden)
    assert torch.allclose(shift["w"], torch.tensor([0.3, 0.4]))
    assert DPSAT(0.5).ascent(0.5, None, _forbidden) is None  # the first step
    assert DPSAT(0.0).ascent(0.0, previous, _forbidden) is None


def test_sam_ascends_along_the_batch_gradient() -> None:
    shift = SAM(0.5).ascent(0.5, None, lambda: {"w": torch.tensor([0.0, -2.0])})
    assert torch.allclose(shift["w"], torch.tensor([0.0, -0.5]))


@pytest.mark.parametrize("method", [DPSGD(), BAM(0.1), BAM(0.1, exact=True)])
def test_the_others_do_not_ascend_and_do_not_peek(method: Method) -> None:
    assert method.ascent(0.1, {"w": torch.ones(2)}, _forbidden) is None


def _forbidden() -> Params:
    raise AssertionError("a private method looked at the batch")


def test_what_each_method_says_of_itself() -> None:
    assert [m.private for m in (DPSGD(), DPSAT(0.1), BAM(), SGD(), SAM(0.1))] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert [m.remembers for m in (DPSGD(), DPSAT(0.1), BAM())] == [0, 1, 0]
    assert [repr(m) for m in (DPSGD(), BAM(0.1), DPSAT(0.2))] == [
        "DPSGD()", "BAM(lam=0.1, exact=False)", "DPSAT(lam=0.2)",
    ]  # fmt: skip


def test_declared_forms() -> None:
    """Only what is a gradient of L + p |g|, or BAM's ascent step, declares it."""
    assert form_of(DPSGD(), 0.0) == form_of(DPSAT(0.3), 0.3) == form_of(SAM(0.3), 0.3)
    assert form_of(BAM(0.0), 0.0) == Penalised(0.0)
    assert form_of(BAM(0.3, exact=True), 0.3) == Penalised(0.3)
    assert form_of(BAM(0.3), 0.3) == Ascended(0.3)
    assert form_of(DiSK(0.5, inner=BAM(0.3)), 0.3) == Ascended(0.3)
    assert form_of(DiSK(0.5, gamma=0.3), 0.0) is None  # two gradients


def test_a_schedule_is_a_function_of_the_step() -> None:
    method = BAM(lambda step, theta: 0.1 / (1 + step))
    assert [method.lam_at(step, {}) for step in (0, 1)] == [0.1, 0.05]
    assert DPSAT(1).lam_at(99, {}) == 1.0


def test_the_default_lambda_is_a_share_of_the_norm_of_the_parameters() -> None:
    theta = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    doubled = {name: 2 * t for name, t in theta.items()}
    assert BAM().lam_at(0, theta) == pytest.approx(5 * SHARE)
    assert BAM().lam_at(7, doubled) == pytest.approx(10 * SHARE)


def test_lambda_warms_up_to_a_constant_or_to_a_schedule() -> None:
    theta = {"w": torch.tensor([3.0, 4.0])}
    assert [WarmUp(0.4, 4)(step, theta) for step in (0, 1, 3, 100)] == [0.1, 0.2, 0.4, 0.4]
    assert WarmUp(Relative(0.1), 2)(0, theta) == pytest.approx(0.25)
    assert WarmUp(0.4, 0)(0, theta) == 0.4


def test_a_negative_share_or_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="share"):
        Relative(-1.0)
    with pytest.raises(ValueError, match="lam at step 3"):
        BAM(lambda step, theta: -1.0).lam_at(3, {})
