import math
import os

import numpy as np
import pytest
import torch
from torch import nn

from dpbam.compute import Compute
from dpbam.data import ShiftFlip, load, to_float
from dpbam.errors import PlanViolationError
from dpbam.methods import BAM, DPSAT, SAM
from dpbam.nn import build_model
from dpbam.oracle import PrivateGradientOracle
from dpbam.params import evaluating
from dpbam.privacy.clipping import FlatClipping
from dpbam.privacy.plan import PrivacyPlan
from dpbam.training.averaging import WeightAverage, dense
from dpbam.training.evaluation import predict_logits
from dpbam.training.events import Reporter
from dpbam.training.trainer import EpsilonCurve, Trainer, augmentation, evaluation_steps
from support import noticed_sums

DIGITS = load("digits").subset(np.arange(200))
TEST = load("digits", split="test").subset(np.arange(50))
_SCALE = "DPBAM_TEST_SCALE"


class Listening(Reporter):
    def __init__(self):
        self.steps, self.evaluations = [], []

    def on_step(self, report):
        self.steps.append(report)

    def on_evaluation(self, report):
        self.evaluations.append(report)


def make(steps=6, *, seed=3, method=None, plan=None, reporter=None, oracle_options=None, **options):
    model = build_model("mlp", in_channels=1, image_size=8, num_classes=10, seed=0, hidden=(8,))
    plan = plan or PrivacyPlan(
        n=200, batch_size=40, steps=steps, noise_multiplier=2.0, delta=1e-3, accountant="rdp"
    )
    oracle = PrivateGradientOracle(
        model, nn.CrossEntropyLoss(reduction="none"), plan, method, seed=seed,
        **{"augment": augmentation(), "compute": Compute(physical_batch_size=64)}
        | (oracle_options or {}),
    )  # fmt: skip
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.05)
    return Trainer(oracle, optimizer, DIGITS, TEST, reporter=reporter, **options)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_the_loop_is_the_researchers_loop():
    trainer = make()
    trainer.run()
    other = make(oracle_options={"augment": None})  # floats come in
    images, labels = DIGITS.batch(np.arange(200))
    for x, y, units in other.oracle.batches((to_float(images), labels)):
        other.oracle.backward(x, y, units)
        other.optimizer.step()
    assert torch.equal(weights(trainer), weights(other))


def test_every_step_is_reported_and_charged_once():
    heard = Listening()
    trainer = make(reporter=heard)
    assert trainer.run() == "complete"
    assert [r.step for r in heard.steps] == [1, 2, 3, 4, 5, 6]
    assert len(trainer.oracle.ledger) == 6
    assert heard.steps[-1].epsilon_at_most == trainer.oracle.plan.epsilon()
    assert heard.steps[-1].seconds_left == 0
    assert heard.steps[0].non_private_loss == pytest.approx(math.log(10), rel=0.5)
    assert heard.steps[1].non_private_loss is None


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_reading_ahead_does_not_change_the_result(num_workers):
    trainer = make(num_workers=num_workers)
    trainer.run()
    expected = make()
    expected.run()
    assert torch.equal(weights(trainer), weights(expected))


def test_evaluations_come_when_due_and_at_the_end():
    trainer = make(steps=7, eval_every=3)
    trainer.run()
    assert [e.step for e in trainer.evaluations] == [3, 6, 7]
    assert trainer.evaluations[0].epsilon == trainer.oracle.plan.epsilon(3)
    last = trainer.evaluations[-1]
    images, labels = TEST.batch(np.arange(50))
    logits = trainer.model(to_float(images))
    assert last.score == float((logits.argmax(1) == labels).double().mean())
    assert last.loss == pytest.approx(float(nn.functional.cross_entropy(logits, labels).detach()))
    assert last.records == 50


def test_the_schedule_sets_the_learning_rate_of_each_step():
    heard = Listening()
    make(reporter=heard, schedule=lambda step: 1 / (1 + step)).run()
    assert [r.lr for r in heard.steps] == pytest.approx([0.05 / k for k in range(1, 7)])


def test_an_average_is_what_is_evaluated_and_training_goes_on_without_it():
    plain, averaged = make(), make()
    averaged.average = WeightAverage(averaged.model, dense(0))
    plain.run()
    averaged.run()
    assert torch.equal(weights(plain), weights(averaged))
    assert plain.evaluations[-1].loss != averaged.evaluations[-1].loss


@pytest.mark.parametrize("method", [DPSAT(0.05), BAM(0.05)])
def test_a_resumed_seeded_run_ends_bit_for_bit_the_same(method):
    undisturbed = make(method=method)
    undisturbed.run()
    first = make(method=method)
    assert first.run(stop=lambda: first.oracle.step == 3) == "stopped"
    second = make(method=method)
    second.oracle.ledger.merge(first.oracle.ledger.entries())
    second.load_state_dict(first.state_dict())
    assert second.run() == "complete"
    assert torch.equal(weights(second), weights(undisturbed))


def test_training_stops_where_the_budget_ends():
    trainer = make(seed=None, max_charges=4)
    assert trainer.run() == "budget ended"
    assert trainer.oracle.step == len(trainer.oracle.ledger) == 4
    assert trainer.evaluations[-1].step == 4


def test_replayed_steps_count_in_an_unseeded_run_only():
    for seed, stops_at in ((None, 4), (3, 6)):
        lost = make(seed=seed)
        lost.run(stop=lambda lost=lost: lost.oracle.step == 2)
        again = make(seed=seed, max_charges=6)
        again.oracle.ledger = lost.oracle.ledger
        again.run()
        assert again.oracle.step == stops_at
        assert len(again.oracle.ledger) == 6


def test_after_step_sees_the_evaluation_of_its_step():
    trainer = make(eval_every=1)
    seen = []
    trainer.run(after_step=lambda: seen.append((trainer.oracle.step, len(trainer.evaluations))))
    assert seen == [(k, k) for k in range(1, 7)]


class KeepsInEval(nn.Module):
    """Centres records by the first one that it saw in eval mode."""

    def __init__(self):
        super().__init__()
        self.last, self.seen = nn.Linear(64, 10), None

    def forward(self, x):
        x = x.flatten(1)
        if not self.training:
            self.seen = x[0]
        return self.last(x if self.seen is None else x - self.seen)


class FixesAScale(nn.Module):
    """Divides by a number that it took from what it saw first, and keeps where no check looks."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        if _SCALE not in os.environ:
            os.environ[_SCALE] = str(math.sin(1e3 * float(x.sum())))
        return self.last(x.flatten(1) / float(os.environ[_SCALE]))


def moved_by_one_record(monkeypatch, model=KeepsInEval, engine="auto"):
    """How far the first record of a step moves the clipped sum of a trainer, in units of C."""
    sums = []
    for start in (0, 1):
        monkeypatch.setenv(_SCALE, "")  # so that what the model sets is undone
        monkeypatch.delenv(_SCALE)
        torch.manual_seed(0)
        plan = PrivacyPlan(n=200, batch_size=40, steps=1, noise_multiplier=1.0, delta=1e-3,
                           clip_norm=0.01, accountant="rdp")  # fmt: skip
        oracle = PrivateGradientOracle(
            model(), nn.CrossEntropyLoss(reduction="none"), plan, augment=augmentation(),
            seed=0, compute=Compute(physical_batch_size=64, engine=engine),
        )  # fmt: skip
        drawn = [tuple(part[start:] for part in batch) for batch in oracle.batches(DIGITS)]
        monkeypatch.setattr(
            oracle, "batches", lambda *args, drawn=drawn, **options: (b for b in drawn)
        )
        optimizer = torch.optim.SGD(oracle.model.parameters(), lr=0.1)
        with noticed_sums() as noticed:
            Trainer(oracle, optimizer, DIGITS, TEST).run()
        sums += noticed
    return float((sums[0] - sums[1]).norm()) / 0.01


def test_what_eval_mode_keeps_of_the_training_data_reaches_no_step(monkeypatch):
    assert moved_by_one_record(monkeypatch) <= 1 + 1e-5


def with_a_pass_before(monkeypatch):
    """Let each step begin with a pass over its records in eval mode, as to measure their loss."""
    backward = PrivateGradientOracle.backward

    def measuring(self, images, labels, units=None):
        self.model.eval()
        self.model(to_float(images))
        self.model.train()
        backward(self, images, labels, units)

    monkeypatch.setattr(PrivateGradientOracle, "backward", measuring)


def test_a_second_pass_would_reach_the_step_through_the_model(monkeypatch):
    with_a_pass_before(monkeypatch)
    assert moved_by_one_record(monkeypatch) > 1.5


def test_the_measured_loss_does_not_fix_a_number(monkeypatch):
    assert moved_by_one_record(monkeypatch, FixesAScale, "loop") <= 1 + 1e-5


def test_a_second_pass_would_fix_a_number(monkeypatch):
    with_a_pass_before(monkeypatch)
    assert moved_by_one_record(monkeypatch, FixesAScale, "loop") > 1.5


def test_the_training_loss_is_that_of_the_steps_own_pass():
    """Of all units of the batch, at the parameters of the step, and without a pass in eval mode."""
    heard, rows_in_eval = Listening(), []
    trainer = make(steps=11, reporter=heard)
    trainer.model.register_forward_pre_hook(
        lambda module, args: rows_in_eval.append(len(args[0])) if not module.training else None
    )
    images, labels, _ = next(make(steps=11).oracle.batches(DIGITS))
    expected = nn.functional.cross_entropy(trainer.model(to_float(images)), labels)
    trainer.run()
    losses = [report.non_private_loss for report in heard.steps]
    assert losses[0] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert [loss is not None for loss in losses] == [True, *[False] * 9, True]
    assert sum(rows_in_eval) == len(TEST)  # the evaluation at the end


def test_a_logical_batch_stays_uint8_until_its_physical_batch_is_computed():
    seen = []
    inner = augmentation(ShiftFlip(shift=1))

    def augment(images, keys):
        seen.append((images.dtype, len(images)))
        return inner(images, keys)

    trainer = make(
        oracle_options={
            "augment": augment,
            "multiplicity": 3,
            "compute": Compute(physical_batch_size=12),
        }
    )
    trainer.run()
    assert {dtype for dtype, _ in seen} == {torch.uint8}
    assert max(rows for _, rows in seen) <= 12


def shuffled(self, dataset, **_):
    """A loader with batches of one size."""
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randperm(200, generator=generator)[:40]
        yield *dataset.batch(chosen), chosen


def everything(self, dataset, **_):
    yield *dataset.batch(np.arange(200)), torch.arange(200)


ELSEWHERE = {"sampling": "poisson-elsewhere"}


class Lenient(FlatClipping):
    def scales(self, norms):
        return torch.ones_like(norms)


@pytest.mark.parametrize(
    ("batches", "options", "words", "taken"),
    [
        (shuffled, {}, "this oracle has drawn no batch", 0),
        (shuffled, ELSEWHERE, "12 batches in a row have 40 units", 11),
        (everything, ELSEWHERE, "the batch has 200 units", 0),
        (None, {"clipping": Lenient(0.01)}, "Lenient lets a unit through", 0),
    ],
)
def test_what_the_plan_does_not_account_for_is_refused(monkeypatch, batches, options, words, taken):
    plan = PrivacyPlan(n=200, batch_size=40, steps=30, noise_multiplier=2.0, delta=1e-3,
                       accountant="rdp", clip_norm=0.01 if batches is None else 1.0)  # fmt: skip
    heard = Listening()
    trainer = make(plan=plan, reporter=heard, oracle_options=options)
    if batches:
        monkeypatch.setattr(PrivateGradientOracle, "batches", batches)
    with pytest.raises(PlanViolationError, match=words):
        trainer.run()
    assert len(trainer.oracle.ledger) == len(heard.steps) == taken


def test_a_run_beyond_the_plan_is_refused(monkeypatch):
    trainer = make()
    trainer.run()
    monkeypatch.setattr(PrivateGradientOracle, "batches", everything)
    with pytest.raises(PlanViolationError, match="all 6 steps of the plan are taken"):
        trainer.run()
    assert len(trainer.oracle.ledger) == 6


def test_a_reference_trains_without_privacy():
    plan = PrivacyPlan.non_private(n=200, batch_size=40, steps=3)
    heard = Listening()
    trainer = make(method=SAM(0.05), plan=plan, reporter=heard)
    trainer.run()
    assert heard.steps[-1].epsilon_at_most == trainer.evaluations[-1].epsilon == math.inf


def test_the_displayed_epsilon_is_an_upper_bound_on_a_coarse_grid():
    plan = PrivacyPlan(
        n=1000, batch_size=100, steps=95, noise_multiplier=2.0, delta=1e-4, accountant="rdp"
    )
    curve = EpsilonCurve(plan)
    bounds = [curve.bound(k) for k in range(1, 121)]
    assert all(bounds[k - 1] >= plan.epsilon(k) for k in (1, 9, 10, 11, 50, 95, 96, 120))
    assert bounds == sorted(bounds)
    assert bounds[94] == plan.epsilon()
    assert len(set(bounds)) <= 13


def test_evaluation_steps():
    plan = PrivacyPlan(n=1000, batch_size=300, steps=50, noise_multiplier=1.0, delta=1e-4)
    assert [evaluation_steps(plan, e) for e in (None, 1, 3)] == [5, 3, 10]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(64, 10)

    def forward(self, x):
        return self.linear(self.drop(x.flatten(1)))


def test_all_records_in_order_whatever_the_batch():
    model, test = Model(), load("digits", split="test")
    logits, labels = predict_logits(model, test, rows=100)
    images, expected = test.batch(torch.arange(len(test)))
    model.eval()
    assert torch.allclose(logits, model(to_float(images)).detach(), atol=1e-5)
    assert torch.equal(labels, expected)


def test_every_module_keeps_its_mode():
    model = Model()
    model.linear.eval()
    with evaluating(model):
        assert not model.drop.training
    assert (model.training, model.drop.training, model.linear.training) == (True, True, False)
