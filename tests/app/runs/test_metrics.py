"""The metrics against scikit-learn, scipy and definitions written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest
from sklearn import metrics as reference

from dpbam.tasks.scores import wilson
from dpbam.tasks.single_label import BINS, SingleLabel, calibration_error


def evaluate(p, y, names, groups=None):
    """Evaluate probabilities, of which logits are the logarithms."""
    return SingleLabel(names).evaluate(np.log(p), y, groups)


def draw(rng, n=200, classes=4):
    logits = rng.normal(size=(n, classes)) * 2
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = np.array([rng.choice(classes, p=row) for row in p])
    y[:classes] = range(classes)  # every class occurs
    return p, y, [f"class {k}" for k in range(classes)]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_scores_are_those_of_scikit_learn(classes):
    p, y, names = draw(np.random.default_rng(classes), classes=classes)
    scores = evaluate(p, y, names).scores
    predicted = p.argmax(1)
    assert scores["accuracy"] == reference.accuracy_score(y, predicted)
    assert scores["balanced_accuracy"] == pytest.approx(
        reference.balanced_accuracy_score(y, predicted)
    )
    if classes == 2:
        expected = reference.roc_auc_score(y, p[:, 1])
    else:
        expected = reference.roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert scores["auc"] == pytest.approx(expected)


def test_confusion_has_labels_in_rows():
    p, y, names = draw(np.random.default_rng(1), classes=3)
    result = evaluate(p, y, names)
    assert (result.figures["confusion"] == reference.confusion_matrix(y, p.argmax(1))).all()
    assert result.classes["class 1"].count == (y == 1).sum()
    assert result.classes["class 1"].scores["value"] == (p.argmax(1) == 1)[y == 1].mean()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_is_wilsons(pair):
    right, count = pair
    expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson(right, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def mean_coverage(interval):
    """The exact share of times that the interval of 100 draws holds p, averaged over p.

    At a single p it swings about the level, because counts are whole: 93.6% at p = 0.9.
    """
    ends = np.array([interval(right) for right in range(101)])
    probabilities = np.linspace(0.05, 0.95, 181)
    held = [
        binom.pmf(np.arange(101), 100, p)[(ends[:, 0] <= p) & (p <= ends[:, 1])].sum()
        for p in probabilities
    ]
    return float(np.mean(held))


def test_interval_covers_as_often_as_it_says():
    assert mean_coverage(lambda right: wilson(right, 100)) == pytest.approx(0.95, abs=0.005)


def test_a_narrower_interval_would_be_noticed():
    def narrow(right):
        ci = binomtest(right, 100).proportion_ci(0.90, method="wilson")
        return ci.low, ci.high

    assert mean_coverage(narrow) < 0.945


def test_calibration_error_by_its_definition():
    rng = np.random.default_rng(2)
    confidence, correct = rng.uniform(0.1, 1, 300), rng.random(300) < 0.6
    expected = 0.0
    for b in range(BINS):
        inside = (confidence > b / BINS) & (confidence <= (b + 1) / BINS)
        if inside.any():
            expected += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    assert calibration_error(confidence, correct) == pytest.approx(expected)


def test_a_calibrated_classifier_has_a_small_error_and_a_boastful_one_has_not():
    p, y, names = draw(np.random.default_rng(3), n=5000)
    boastful = p**3 / (p**3).sum(1, keepdims=True)
    honest = evaluate(p, y, names).scores["calibration_error"]
    assert honest < 0.03 < evaluate(boastful, y, names).scores["calibration_error"]


def test_groups_partition_the_records_and_the_worst_is_named():
    p, y, names = draw(np.random.default_rng(4))
    sex = np.where(np.arange(len(y)) % 3 == 0, "f", "m")
    p[(sex == "f")] = np.roll(p[sex == "f"], 1, axis=1)  # the model fails women
    result = evaluate(p, y, names, {"sex": sex, "age": np.arange(len(y)) // 100})
    groups = result.groups["sex"]
    assert result.worst("sex") == "f"
    assert groups["f"].count + groups["m"].count == len(y)
    mine = sex == "f"
    assert groups["f"].scores["accuracy"] == (p[mine].argmax(1) == y[mine]).mean()
    assert set(result.groups["age"]) == {"0", "1"}
    assert result.to_dict()["groups"]["sex"]["worst"] == "f"


def test_absent_classes_are_left_out_of_means():
    p = np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.5, 0.4, 0.1]])
    result = evaluate(p, np.array([0, 1, 1]), ["a", "b", "c"])
    assert result.scores["balanced_accuracy"] == pytest.approx(0.75)
    assert math.isnan(result.classes["c"].scores["value"])
    assert 0 <= result.scores["auc"] <= 1


def test_a_group_of_one_class_has_no_auc():
    p = np.array([[0.8, 0.2], [0.7, 0.3], [0.1, 0.9]])
    result = evaluate(p, np.array([0, 0, 1]), ["a", "b"], {"g": np.array([0, 0, 1])})
    assert math.isnan(result.groups["g"]["0"].scores["auc"])
    assert result.scores["auc"] == 1.0


@pytest.mark.parametrize(
    ("p", "y", "says"),
    [
        (np.zeros((0, 2)), np.zeros(0, int), "no records"),
        (np.full((2, 2), np.nan), np.array([0, 1]), "diverged"),
    ],
)
def test_refuses(p, y, says):
    with pytest.raises(ValueError, match=says):
        evaluate(p, y, ["a", "b"])


def test_refuses_a_column_of_too_many_values():
    p, y, names = draw(np.random.default_rng(5))
    with pytest.raises(ValueError, match="200 different values"):
        evaluate(p, y, names, {"id": np.arange(len(y))})
