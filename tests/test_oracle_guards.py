"""What the oracle refuses, each with one sentence that teaches; and its edge cases."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from dpbam import (
    BAM,
    DPSAT,
    Compute,
    FlatClipping,
    Ledger,
    Method,
    PrivacyPlan,
    PrivateGradientOracle,
)
from dpbam.errors import PlanViolationError
from dpbam.methods import SAM, SGD
from dpbam.nn import replace_batch_norm
from dpbam.privacy.accounting import Charge
from support import (
    ACCOUNTANTS,
    ENGINES,
    METHODS,
    SERVED,
    cross_entropy,
    each_gradient,
    flat,
    gradients,
    in_turn,
    one_step,
    private_plan,
    quiet_plan,
    samples,
    sized_oracle,
    smooth_net,
)

L = 10


# --- the model and the loss


def test_batch_norm_is_refused_with_the_repair_named() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\).*replace_batch_norm\(model\)"):
        sized_oracle(model, cross_entropy, private_plan())
    x, y = samples(4)
    assert one_step(replace_batch_norm(model), private_plan(), x.float(), y)


def test_batch_norm_switched_on_in_the_middle_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    oracle = sized_oracle(model, cross_entropy, private_plan())
    x, y = samples(4)
    oracle.backward(x.float(), y)
    model.train()
    with pytest.raises(ValueError, match="mixes the samples"):
        oracle.backward(x.float(), y)
    assert len(oracle.ledger) == 1


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no trainable parameter.*requires_grad_\(True\)"):
        sized_oracle(smooth_net().requires_grad_(False), cross_entropy, private_plan())


def test_thawing_a_layer_needs_a_new_oracle() -> None:
    model, (x, y) = smooth_net(), samples(4)
    model[0].requires_grad_(False)
    oracle = sized_oracle(model, cross_entropy, private_plan())
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="make a new oracle after freezing or unfreezing"):
        oracle.backward(x, y)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scalar_loss_is_refused(engine: str) -> None:
    model, (x, y) = smooth_net(), samples(4)
    with pytest.raises(ValueError, match=r"returned a scalar.*reduction='none'"):
        one_step(model, private_plan(), x, y, loss=nn.CrossEntropyLoss(), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_of_another_shape_is_refused(engine: str) -> None:
    model, (x, y) = smooth_net(), samples(4)
    with pytest.raises(ValueError, match=r"one value per sample.*flatten\(1\)\.mean\(1\)"):
        one_step(model, private_plan(), x, y, loss=lambda out, y: out, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_is_no_tensor_is_refused(engine: str) -> None:
    model, (x, y) = smooth_net(), samples(4)
    with pytest.raises(TypeError, match="must return a tensor, got float"):
        one_step(model, private_plan(), x, y, loss=lambda out, y: 1.0, engine=engine)


# --- the method, the clipping and the settings


@pytest.mark.parametrize("lam", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("make", [BAM, DPSAT, SAM])
def test_lambda_must_be_a_finite_number_from_zero(make: type[Method], lam: float) -> None:
    with pytest.raises(ValueError, match="lam must be"):
        make(lam)


def test_lambda_must_be_a_number() -> None:
    with pytest.raises(TypeError, match=r"lam must be a number, got '0\.1'"):
        BAM("0.1")


def test_a_schedule_is_checked_at_its_step() -> None:
    model, (x, y) = smooth_net(), samples(4)
    oracle = sized_oracle(model, cross_entropy, private_plan(), BAM(lambda step, theta: 0.1 - step))
    oracle.backward(x, y)
    with pytest.raises(ValueError, match=r"lam at step 1 must be zero or positive"):
        oracle.backward(x.clone(), y)
    assert len(oracle.ledger) == 1


@pytest.mark.parametrize("method", [SGD(), SAM(0.1)])
def test_a_reference_without_privacy_needs_a_plan_without_privacy(method: Method) -> None:
    with pytest.raises(ValueError, match=r"cannot be private.*non_private"):
        sized_oracle(smooth_net(), cross_entropy, private_plan(), method)


class Peeker(Method):
    """Says that it is private, and asks for the batch gradient."""

    name = "peeker"
    remembers = 0

    def ascent(self, lam, previous, batch_gradient):
        return batch_gradient()

    def direction(self, grad, theta, lam):
        return grad(theta)


def test_a_method_that_peeks_at_the_batch_is_refused() -> None:
    model, (x, y) = smooth_net(), samples(4)
    with pytest.raises(ValueError, match="peeker asks for the batch gradient, which has no noise"):
        one_step(model, private_plan(), x, y, method=Peeker())
    assert one_step(model, quiet_plan(1.0), x, y, method=Peeker(), engine="functional")


def test_a_clipping_must_have_the_plans_sensitivity() -> None:
    with pytest.raises(ValueError, match=r"sensitivity 2 is not the plan's clip_norm 1"):
        sized_oracle(smooth_net(), cross_entropy, private_plan(), clipping=FlatClipping(2.0))


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'functional'"):
        sized_oracle(smooth_net(), cross_entropy, private_plan(), engine="functonal")


@pytest.mark.parametrize("setting", ["physical_batch_size", "multiplicity"])
def test_sizes_are_at_least_one(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be at least 1, got 0"):
        sized_oracle(smooth_net(), cross_entropy, private_plan(), **{setting: 0})


def test_a_noise_seed_needs_a_seed() -> None:
    with pytest.raises(ValueError, match="noise_seed needs a seed"):
        sized_oracle(smooth_net(), cross_entropy, private_plan(), noise_seed=1)


# --- the batch


@pytest.mark.parametrize(
    ("inputs", "targets", "units", "error", "words"),
    [
        (torch.zeros(4, 4), torch.zeros(3), None, ValueError, "4 inputs but 3 targets"),
        (torch.zeros(4, 4), torch.zeros(4), torch.arange(3), ValueError, "shape .4,., got .3,."),
        ([1.0, 2.0], torch.zeros(2), None, TypeError, "tensor, or a tuple or dict of tensors"),
        (torch.tensor(1.0), torch.zeros(1), None, TypeError, "first axis that counts the samples"),
        ({"a": torch.zeros(4, 1), "b": torch.zeros(3, 1)}, torch.zeros(4), None, ValueError,
         r"same first axis, got sizes \[3, 4\]"),
    ],
)  # fmt: skip
def test_a_batch_of_the_wrong_shape_is_refused(inputs, targets, units, error, words) -> None:
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan())
    with pytest.raises(error, match=words):
        oracle.backward(inputs, targets, units)
    assert len(oracle.ledger) == 0


def test_a_record_twice_in_one_batch_is_refused() -> None:
    model, (x, y) = smooth_net(), samples(4)
    with pytest.raises(ValueError, match=r"unit 7 has 2 rows.*may enter a step once"):
        one_step(model, private_plan(), x, y, units=torch.tensor([1, 7, 3, 7]))


def test_a_group_above_its_cap_is_refused() -> None:
    model, (x, y) = smooth_net(), samples(4)
    plan = private_plan(unit="patient", max_records=2)
    with pytest.raises(ValueError, match=r"unit 7 has 3 rows.*plan allows 2"):
        one_step(model, plan, x, y, units=torch.tensor([7, 7, 3, 7]))


def test_a_group_plan_needs_the_units() -> None:
    """Without them each record would be clipped by itself, and a patient count many times."""
    model, (x, y) = smooth_net(), samples(4)
    with pytest.raises(ValueError, match="the plan's unit is the patient: pass units"):
        one_step(model, private_plan(unit="patient", max_records=2), x, y)


def test_an_augmentation_that_drops_rows_is_refused() -> None:
    model, (x, y) = smooth_net(), samples(4)
    with pytest.raises(ValueError, match="augment returned 1 rows for 2"):
        one_step(
            model, private_plan(), x, y, multiplicity=2, augment=lambda x, keys: x[1:],
            physical_batch_size=2,
        )  # fmt: skip


# --- edge cases


@pytest.mark.parametrize(("engine", "method"), SERVED)
def test_an_empty_batch_is_a_step_of_noise_alone(engine: str, method: str) -> None:
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, private_plan(), METHODS[method](0.1), engine=engine)
    for _ in range(2):
        oracle.backward(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, dtype=torch.long))
        assert 0.03 < float(flat(gradients(model)).std()) < 0.3  # sigma C / l = 0.1
    assert (oracle.step, len(oracle.ledger)) == (2, 2)


@pytest.mark.parametrize(("engine", "method", "bad"), in_turn(SERVED, [math.nan, math.inf, 1e300]))
def test_a_bad_sample_counts_as_zero_as_a_whole(engine: str, method: str, bad: float) -> None:
    model, (x, y) = smooth_net(), samples(6)
    make = METHODS[method]
    x[0] = bad
    model[1] = nn.Identity()  # tanh would save the huge sample
    expected = one_step(model, quiet_plan(0.5), x[1:], y[1:], method=make(0.1), engine=engine)
    found = one_step(model, quiet_plan(0.5), x, y, method=make(0.1), engine=engine)
    assert torch.allclose(flat(found), flat(expected), atol=1e-12)


@pytest.mark.parametrize(("engine", "method"), SERVED)
def test_a_zero_gradient_contributes_zero_and_no_nan(engine: str, method: str) -> None:
    model, (x, y) = nn.Linear(4, 3, bias=False).double(), samples(6)
    x[0] = 0  # without a bias its gradient is zero
    make, seen = METHODS[method], []

    class Norms:
        wants_plain = False

        def begin(self, facts):
            return True

        def observe(self, batch):
            seen.append(batch.norms)

        def finish(self, clipped, released):
            pass

    options = {"method": make(0.1), "engine": engine, "observers": Norms()}
    found = one_step(model, quiet_plan(0.5), x, y, **options)
    expected = one_step(model, quiet_plan(0.5), x[1:], y[1:], **options)
    assert torch.allclose(flat(found), flat(expected), atol=1e-12)
    assert float(seen[0][0, 0]) == 0
    assert bool(torch.isfinite(seen[0]).all())


def test_a_plan_without_privacy_spends_infinite_epsilon() -> None:
    """Also with noise: SAM has looked at the batch."""
    model, (x, y) = smooth_net(), samples(4)
    plan = quiet_plan(1.0, noise_multiplier=3.0)
    oracle = sized_oracle(model, cross_entropy, plan, SAM(0.1))
    oracle.backward(x, y)
    assert plan.epsilon() == oracle.ledger.epsilon() == math.inf


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_the_ledger_counts_what_was_released(accountant: str) -> None:
    model, (x, y) = smooth_net(), samples(4)
    plan = private_plan(accountant=accountant)
    oracle = sized_oracle(model, cross_entropy, plan)
    for _ in range(3):
        oracle.backward(x.clone(), y)
    assert oracle.ledger.epsilon() == pytest.approx(plan.epsilon(steps=3))


def test_a_step_waits_for_the_release_before_it_to_be_charged() -> None:
    plan, (x, y) = private_plan(released_before=1.0), samples(4)
    oracle = sized_oracle(smooth_net(), cross_entropy, plan)
    with pytest.raises(PlanViolationError, match=r"sigma 1\) is not on the ledger: make it"):
        oracle.backward(x, y)
    assert not oracle.ledger.charges()
    oracle.ledger.charge(oracle.before, 0, noise_multiplier=1.0, sampling_rate=1.0)
    oracle.backward(x, y)
    assert oracle.ledger.epsilon() == pytest.approx(plan.epsilon(steps=1))


def two_trainings(*, charges: int, sigma: float = 1.0) -> Ledger:
    """Two trainings with a release each on one ledger, of which the first ``charges`` charge it."""
    plan, (x, y) = private_plan(released_before=1.0), samples(4)
    ledger = plan.ledger()
    for k in range(2):
        oracle = sized_oracle(smooth_net(), cross_entropy, plan, ledger=ledger)
        if k < charges:
            ledger.charge(oracle.before, 0, noise_multiplier=sigma, sampling_rate=1.0)
        oracle.backward(x.clone(), y)
        resumed = sized_oracle(smooth_net(), cross_entropy, plan, ledger=ledger)
        resumed.load_state_dict(oracle.state_dict())
        resumed.backward(x.clone(), y)  # the same release
    return ledger


def test_every_training_on_a_ledger_needs_a_charge_of_its_own_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = two_trainings(charges=2)
    assert Charge(1.0, 1.0, 2) in both.charges()
    with pytest.raises(PlanViolationError, match=r"sigma 1\) is not on the ledger: make it"):
        two_trainings(charges=1)
    with pytest.raises(PlanViolationError, match=r"sigma 1\) is not on the ledger: make it"):
        two_trainings(charges=2, sigma=2.0)  # less than it costs

    def by_any(plan: PrivacyPlan, ledger: Ledger, stream: str) -> None:
        assert ledger.released_before()

    monkeypatch.setattr(PrivacyPlan, "check_before", by_any)  # negative control
    assert two_trainings(charges=1).epsilon() < 0.8 * both.epsilon()


# --- the ledger's rules for replays


def run(path: Path, seed: int | None, steps: int, scale: float = 1.0) -> PrivateGradientOracle:
    """A process of its own, as far as the ledger can tell."""
    model, (x, y) = smooth_net(), samples(4)
    ledger = Ledger(delta=1e-3, path=path)
    oracle = sized_oracle(model, cross_entropy, private_plan(), seed=seed, ledger=ledger)
    oracle.expect_earlier_steps()
    for _ in range(steps):
        oracle.backward(scale * x, y)
    return oracle


def test_a_seeded_replay_of_the_same_release_is_not_charged(tmp_path: Path) -> None:
    assert len(run(tmp_path / "ledger", 1, 2).ledger) == 2
    assert len(run(tmp_path / "ledger", 1, 3).ledger) == 3


def test_a_seeded_step_with_another_release_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "ledger", 1, 2)
    with pytest.raises(ValueError, match=r"noise of step 0 .* reveal their difference"):
        run(tmp_path / "ledger", 1, 1, scale=2.0)


def test_an_unseeded_replay_is_charged_again(tmp_path: Path) -> None:
    run(tmp_path / "ledger", None, 2)
    assert len(run(tmp_path / "ledger", None, 2).ledger) == 4


def test_going_back_in_the_same_process_is_charged_again() -> None:
    model, (x, y) = smooth_net(), samples(4)
    oracle = sized_oracle(model, cross_entropy, private_plan())
    state = oracle.state_dict()
    oracle.backward(x, y)
    first = flat(gradients(model))
    oracle.load_state_dict(state)
    oracle.backward(x.clone(), y)
    assert not torch.equal(flat(gradients(model)), first)
    assert len(oracle.ledger) == 2


def test_a_failing_ledger_keeps_the_result_back() -> None:
    model, (x, y) = smooth_net(), samples(4)

    class FullDisk(Ledger):
        def charge(self, *args, **kwargs) -> None:
            raise OSError("no space left on device")

    oracle = sized_oracle(model, cross_entropy, private_plan(), DPSAT(0.1), ledger=FullDisk(1e-3))
    with pytest.raises(OSError, match="no space"):
        oracle.backward(x, y)
    assert all(p.grad is None for p in model.parameters())
    assert oracle.state_dict() == {"step": 0, "parts": {}}


def test_a_float16_norm_that_would_underflow_is_clipped() -> None:
    """4096 entries of 1e-4: their squares vanish in float16, their norm is 6.4e-3."""
    model = nn.Linear(4096, 1, bias=False).half()
    x, y = torch.full((1, 4096), 1e-4, dtype=torch.float16), torch.zeros(1)
    for engine in ENGINES:
        found = one_step(
            model,
            quiet_plan(1e-3, batch_size=1),
            x,
            y,
            loss=lambda out, y: out[:, 0],
            engine=engine,
        )
        assert float(flat(found).norm()) == pytest.approx(1e-3, rel=0.01)
    assert float(flat(each_gradient(model, x, y, lambda out, y: out[:, 0])[0]).norm()) > 6e-3


# --- states, observers, and batches that are not drawn


def test_a_state_without_a_step_or_with_parts_of_another_run_is_refused() -> None:
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan())
    with pytest.raises(ValueError, match=r"the state has no step, but model: pass what state_dict"):
        oracle.load_state_dict({"model": {}})
    others = ("method/length", "filter/average", "clipping/norm", "history/0/gradient/weight", "x")
    for part in others:
        state = {"step": 0, "parts": {part: torch.zeros(1)}}
        with pytest.raises(ValueError, match=f"the state has {part}, for which this oracle has no"):
            oracle.load_state_dict(state)


def test_what_cannot_observe_is_refused_before_a_step() -> None:
    class Half:
        wants_plain = False

        def begin(self, facts: object) -> bool:
            return True

    for observer, words in ((Half(), r"Half is no Observer: it has no observe\(batch\)"),
                            ("x", r"str is no Observer: it has no begin\(facts\)")):  # fmt: skip
        with pytest.raises(TypeError, match=words):
            sized_oracle(smooth_net(), cross_entropy, private_plan(), observers=[observer])


def test_an_empty_batch_has_no_directions() -> None:
    model, (x, y) = smooth_net(), samples(3)
    directions = sized_oracle(model, cross_entropy, private_plan()).per_sample(x[:0], y[:0])
    assert directions.non_private_norms.shape == (0,)
    assert directions.non_private_gradients["0.weight"].shape == (0, 6, 4)


def test_to_ask_how_many_batches_are_left_draws_none() -> None:
    """A schedule of the learning rate asks; a shuffled loader is refused all the same."""
    oracle = PrivateGradientOracle(smooth_net(), cross_entropy, private_plan())
    data = samples(100)
    assert len(oracle.batches(data)) == private_plan().steps
    oracle.sampler()
    with pytest.raises(PlanViolationError, match="this oracle has drawn no batch"):
        oracle.backward(*samples(L))
    oracle.backward(*next(iter(oracle.batches(data))))


def test_an_iterator_is_no_data_set() -> None:
    oracle = PrivateGradientOracle(smooth_net(), cross_entropy, private_plan())
    with pytest.raises(TypeError, match="list_iterator has no length"):
        oracle.batches(iter([1, 2]))


def test_a_row_beyond_the_memory_limit_is_warned_of() -> None:
    oracle = PrivateGradientOracle(
        smooth_net(), cross_entropy, private_plan(), compute=Compute(memory_limit=10)
    )
    with pytest.warns(UserWarning, match=r"one row takes [\d,]+ bytes, more than memory_limit=10"):
        oracle.fit(*samples(2))


class Cholesky(nn.Module):
    """Fails on rows without a record, and on a record that is not positive definite."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.linalg.cholesky(x).flatten(1))


def test_a_record_on_which_all_engines_fail_gives_none_of_them_up() -> None:
    oracle = sized_oracle(Cholesky(), cross_entropy, private_plan())
    y, good = torch.zeros(3, dtype=torch.long), torch.eye(2).repeat(3, 1, 1)
    bad = good.clone()
    bad[1] = -torch.eye(2)
    with pytest.raises(RuntimeError):
        oracle.backward(bad, y)
    for _ in range(2):
        oracle.backward(good.clone(), y)
    assert (oracle.engine.name, len(oracle.ledger)) == ("fused", 2)


@pytest.mark.parametrize("wrong", ["bam", BAM, lambda grad, theta, lam: grad(theta)])
def test_a_method_by_name_or_class_is_refused_in_a_sentence(wrong: object) -> None:
    for name in ("method", "clipping", "filter"):
        with pytest.raises(TypeError, match=rf"{name} must be an object of dpbam\..*, got "):
            sized_oracle(smooth_net(), cross_entropy, private_plan(), **{name: wrong})


def test_a_new_training_on_an_old_ledger_file_is_warned(tmp_path: Path) -> None:
    """Not one that continues: it loads its state."""
    plan = private_plan(n=40, batch_size=4, steps=2)

    def oracle_on(path: Path) -> PrivateGradientOracle:
        ledger = plan.ledger(path)
        return PrivateGradientOracle(smooth_net(), cross_entropy, plan, ledger=ledger)

    first = oracle_on(tmp_path / "ledger.jsonl")
    first.backward(*next(first.batches(samples(40))))
    state = first.state_dict()
    first.ledger.close()
    resumed = oracle_on(tmp_path / "ledger.jsonl")
    resumed.load_state_dict(state)
    resumed.backward(*next(resumed.batches(samples(40))))
    resumed.ledger.close()
    again = oracle_on(tmp_path / "ledger.jsonl")
    batches = again.batches(samples(40))
    with pytest.warns(
        UserWarning, match="has 2 steps of an earlier training: its epsilon will end"
    ):
        again.backward(*next(batches))
    again.backward(*next(batches))
