"""The loss of a record, metrics and predictions of each task, against independent computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dpbam.catalogue import TASKS
from dpbam.data import from_arrays
from dpbam.data.dataset import TASKS as DATA_TASKS
from dpbam.errors import ArgumentError
from dpbam.nn import UNet
from dpbam.tasks.base import make_task
from dpbam.tasks.multi_label import MultiLabel
from dpbam.tasks.regression import Regression
from dpbam.tasks.scores import explain_no_gain, is_useless
from dpbam.tasks.segmentation import Segmentation
from dpbam.tasks.single_label import SingleLabel
from dpbam.training.evaluation import summarise

NAMES = ("a", "b", "c")


def example(task: str, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets of a task with three classes."""
    output = torch.randn(rows, 3)
    if task == "single-label":
        return output, torch.arange(rows) % 3
    if task == "multi-label":
        return output, (torch.rand(rows, 3) < 0.4).to(torch.uint8)
    if task == "regression":
        return output[:, :1], torch.rand(rows) * 100
    return torch.randn(rows, 3, 4, 6), torch.randint(0, 3, (rows, 4, 6), dtype=torch.uint8)


def made(task: str, **settings):
    if task == "regression":
        return make_task(task, ["age"], target_range=(0.0, 100.0), **settings)
    return make_task(task, NAMES, **settings)


def test_every_kind_of_labels_has_a_task():
    assert set(TASKS) == set(DATA_TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_record_has_its_loss_in_any_batch(name):
    task, (output, targets) = made(name), example(name)
    alone = torch.cat([task(output[k : k + 1], targets[k : k + 1]) for k in range(5)])
    assert torch.allclose(task(output, targets), alone, atol=1e-6)
    assert task.blank_targets(2, 4, 6).shape == targets[:2].shape
    assert task.blank_targets(2, 4, 6).dtype == targets.dtype


def test_single_label_without_weights_is_cross_entropy_to_the_bit():
    output, targets = example("single-label")
    expected = F.cross_entropy(output, targets, reduction="none")
    assert torch.equal(made("single-label")(output, targets), expected)


def test_weights_multiply_the_loss_of_their_class():
    output, targets = example("single-label")
    plain, weighted = made("single-label"), made("single-label", class_weights={"b": 3.0})
    factor = torch.where(targets == 1, 3.0, 1.0)
    assert torch.allclose(weighted(output, targets), factor * plain(output, targets))


def test_weights_of_findings_are_torchs_positive_weights():
    output, targets = example("multi-label")
    weights = torch.tensor([1.0, 5.0, 1.0])
    expected = F.binary_cross_entropy_with_logits(
        output, targets.float(), pos_weight=weights, reduction="none"
    ).mean(1)
    task = made("multi-label", class_weights={"b": 5.0})
    assert torch.allclose(task(output, targets), expected, atol=1e-6)


def test_weights_of_pixels():
    output, targets = example("segmentation")
    nll = F.cross_entropy(output, targets.long(), reduction="none")
    expected = (nll * torch.where(targets == 2, 4.0, 1.0)).flatten(1).mean(1)
    task = made("segmentation", class_weights={"c": 4.0})
    assert torch.allclose(task(output, targets), expected, atol=1e-6)


def test_focal_loss_is_the_papers_formula_with_finite_derivatives():
    output, targets = example("single-label")
    p = output.softmax(1)[torch.arange(5), targets]
    task = made("single-label", focal=2.0)
    assert torch.allclose(task(output, targets), -((1 - p) ** 2) * p.log(), atol=1e-6)
    sure = torch.tensor([[90.0, 0.0, 0.0]], requires_grad=True)  # p = 1 in float32
    for gamma in (0.5, 1.0, 2.0):
        loss = made("single-label", focal=gamma)(sure, torch.tensor([0])).sum()
        (first,) = torch.autograd.grad(loss, sure, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), sure, allow_unused=True)
        assert first.isfinite().all()
        assert second is None or second.isfinite().all()


def test_scores_of_findings_are_scikit_learns():
    from sklearn.metrics import average_precision_score, roc_auc_score

    rng = np.random.default_rng(0)
    y, z = rng.integers(0, 2, (50, 3)), rng.normal(size=(50, 3))
    found = MultiLabel(NAMES).scores(z, y)
    assert found["auc"] == pytest.approx(roc_auc_score(y, z, average="macro"))
    assert found["micro_auc"] == pytest.approx(roc_auc_score(y, z, average="micro"))
    assert found["average_precision"] == pytest.approx(average_precision_score(y, z))
    micro = average_precision_score(y, z, average="micro")
    assert found["micro_average_precision"] == pytest.approx(micro)


def test_a_finding_that_never_occurs_has_no_auc_and_does_not_spoil_the_mean():
    y = np.array([[1, 0], [0, 0], [1, 0]])
    task = MultiLabel(["a", "b"])
    assert math.isnan(task.by_class(np.zeros((3, 2)), y)["b"].scores["value"])
    assert task.scores(np.array([[1.0, 0], [0, 0], [1, 0]]), y)["auc"] == 1.0


def test_scores_of_a_regression_are_scikit_learns():
    from sklearn.metrics import mean_absolute_error, r2_score

    rng = np.random.default_rng(1)
    y = rng.uniform(0, 100, 40)
    value = y + rng.normal(size=40)
    found = Regression(["age"], target_range=(0, 100)).scores(value[:, None], y)
    assert found["r2"] == pytest.approx(r2_score(y, value))
    assert found["mae"] == pytest.approx(mean_absolute_error(y, value))
    assert found["spearman"] > 0.99
    constant = Regression(["age"], target_range=(0, 100)).scores(np.full((40, 1), y.mean()), y)
    assert constant["r2"] == pytest.approx(0)
    assert math.isnan(constant["spearman"])


def test_scaled_targets_and_predictions_are_inverse():
    task = Regression(["age"], target_range=(20.0, 60.0))
    targets = torch.tensor([20.0, 33.0, 60.0])
    output = (2 * (targets - 20) / 40 - 1)[:, None]
    assert task(output, targets).abs().max() < 1e-12
    assert torch.allclose(task.predictions(output)[:, 0].float(), targets)


def test_dice_and_iou_count_pixels_of_the_whole_set():
    output, targets = example("segmentation", rows=4)
    task = Segmentation(NAMES)
    summaries, _ = task.summary(output, targets)
    said = output.argmax(1)
    found = task.by_class(summaries.double().numpy(), np.zeros(4))
    for k, name in enumerate(NAMES):
        both = ((said == k) & (targets == k)).sum().item()
        either = ((said == k) | (targets == k)).sum().item()
        assert found[name].scores["iou"] == pytest.approx(both / either)
        assert found[name].scores["value"] == pytest.approx(2 * both / (both + either))
    mean = (found["b"].scores["value"] + found["c"].scores["value"]) / 2
    assert task.scores(summaries.double().numpy(), np.zeros(4))["dice"] == pytest.approx(mean)


def test_a_set_is_summarised_alike_in_any_batches():
    data = from_arrays(
        np.random.default_rng(0).integers(0, 256, (7, 8, 8), dtype=np.uint8),
        np.random.default_rng(1).integers(0, 3, (7, 8, 8), dtype=np.uint8),
    )
    model = UNet(1, 3, width=4, depth=1)
    task = Segmentation(data.class_names)
    for one, other in zip(
        summarise(model, data, task, rows=2), summarise(model, data, task, rows=7), strict=True
    ):
        assert torch.allclose(one.double(), other.double(), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("single-label", {"class_weights": {"d": 2.0}}, "names 'd', which is no class"),
        ("single-label", {"class_weights": {"a": 0.0}}, "weight of class 'a' must be positive"),
        ("single-label", {"focal": -1.0}, "focal must be zero or positive"),
        ("single-label", {"target_range": (0, 1)}, "target_range is for a regression"),
        ("regression", {}, "needs --target-range LOW:HIGH, a public fact"),
        ("regression", {"target_range": (5, 5)}, "must be low:high, got 5:5"),
        ("regression", {"target_range": (0, 1), "focal": 2.0}, "for classes, not for a regression"),
    ],
)
def test_settings_that_a_task_does_not_have_are_refused(name, settings, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        make_task(name, NAMES, **settings)


def test_a_model_with_other_outputs_is_refused():
    images = torch.zeros(1, 1, 8, 8)
    with pytest.raises(ArgumentError, match=r"outputs \[3, 8, 8\] .* gives \[3\]: pass --model"):
        Segmentation(NAMES).check_output(torch.zeros(1, 3), images)
    with pytest.raises(ArgumentError, match=r"unet is for segmentation"):
        MultiLabel(NAMES).check_output(torch.zeros(1, 3, 8, 8), images)


def outputs_that(say, labels, classes=3):
    """Return outputs whose largest is at the class that ``say`` gives for each label."""
    return np.eye(classes)[[say(k, y) for k, y in enumerate(labels)]]


SKEWED = np.array([0] * 180 + [1] * 15 + [2] * 5)


@pytest.mark.parametrize(
    ("say", "useless"),
    [
        (lambda k, y: 0, True),  # the most frequent class
        (lambda k, y: k % 3, True),  # any class, whatever the image
        (lambda k, y: y, False),
        (lambda k, y: 0 if y == 0 and k % 10 else 1, False),  # less accurate, and knows the ill
    ],
)
def test_a_model_that_knows_nothing_is_useless(say, useless):
    found = SingleLabel(["well", "ill", "odd"]).compared(outputs_that(say, SKEWED), SKEWED)
    assert found["accuracy"].constant == pytest.approx(0.9)
    assert found["balanced_accuracy"].constant == pytest.approx(1 / 3)
    assert is_useless(found) is useless


@pytest.mark.parametrize(("records", "useless"), [(8, None), (400, True)])
def test_a_handful_of_records_does_not_show_that_a_model_is_useless(records, useless):
    labels = np.arange(records) % 2
    found = SingleLabel(["a", "b"]).compared(outputs_that(lambda k, y: k // 2 % 2, labels), labels)
    assert (found["accuracy"].score, found["accuracy"].constant) == (0.5, 0.5)
    assert is_useless(found) is useless
    words = "too few test records to tell" if useless is None else "this model is useless"
    assert words in explain_no_gain(found)


def test_a_perfect_model_is_told_from_chance_on_a_handful_of_records():
    labels = np.arange(8) % 2
    found = SingleLabel(["a", "b"]).compared(outputs_that(lambda k, y: y, labels), labels)
    assert is_useless(found) is False
    one_class = SingleLabel(["a", "b"]).compared(
        outputs_that(lambda k, y: y, labels * 0), labels * 0
    )
    assert is_useless(one_class) is None


def test_balanced_accuracy_is_the_one_of_the_metrics():
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(60, 3)), rng.integers(0, 2, 60)  # the third never occurs
    expected = SingleLabel(["a", "b", "c"]).evaluate(outputs, labels).scores
    found = SingleLabel(["a", "b", "c"]).compared(outputs, labels)
    assert found["balanced_accuracy"].score == pytest.approx(expected["balanced_accuracy"])
    assert found["accuracy"].score == pytest.approx(expected["accuracy"])
    assert found["balanced_accuracy"].constant == 0.5


def test_chance_is_the_spread_of_models_that_know_nothing():
    rng = np.random.default_rng(1)
    task, scores = SingleLabel(["a", "b", "c"]), []
    for _ in range(2000):
        found = task.compared(rng.random((len(SKEWED), 3)), SKEWED)
        scores.append(found["balanced_accuracy"].score)
    # the sample deviation of 2,000 has a relative error of 1.6%: six of them are 10%
    assert np.std(scores) == pytest.approx(found["balanced_accuracy"].chance, rel=0.1)


@pytest.mark.parametrize("knows", [False, True])
def test_other_tasks_have_a_constant_to_beat(knows):
    rng = np.random.default_rng(2)
    findings = rng.integers(0, 2, (100, 2))
    noise = rng.normal(size=(100, 2))
    compared = MultiLabel(["x", "y"]).compared(noise + 3 * findings * knows, findings)["auc"]
    assert (compared.constant, compared.better) == (0.5, knows)
    ages = rng.uniform(0, 100, 100)
    told = (ages if knows else np.full(100, ages.mean()))[:, None]
    compared = Regression(["age"], target_range=(0, 100)).compared(told, ages)["r2"]
    assert (compared.constant, compared.better) == (0.0, knows)
    pixels = np.array([[[60, 0], [0, 40]]] if knows else [[[0, 60], [0, 40]]])
    compared = Segmentation(["back", "disc"]).compared(pixels, np.zeros(1))["dice"]
    assert compared.constant == pytest.approx(80 / 140)
    assert compared.better is knows
