"""The calculators agree with the accountant and with each other."""

from __future__ import annotations

import json

import pytest

from dpbam.privacy import accounting

PAPER = ["--n", 50_000, "--batch-size", 4096]


def answer(ended):
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_epsilon_is_the_accountants(dpbam):
    got = answer(
        dpbam("epsilon", "--noise-multiplier", 1.731, *PAPER, "--steps", 1000, "--delta", 1e-5,
              "--json")
    )  # fmt: skip
    assert got["epsilon"] == accounting.epsilon(1.731, 4096 / 50_000, 1000, 1e-5)
    assert got["accountant"] == accounting.accountant_version("pld")


def test_epochs_are_passes_over_the_data(dpbam):
    got = answer(
        dpbam("epsilon", "--noise-multiplier", 2, *PAPER, "--epochs", 75, "--accountant", "rdp",
              "--json")
    )  # fmt: skip
    assert got["steps"] == round(75 * 50_000 / 4096)
    assert got["delta"] == 1e-7


def test_calibrated_noise_keeps_within_the_budget_and_is_needed(dpbam):
    arguments = [*PAPER, "--steps", 100, "--delta", 1e-5, "--accountant", "rdp", "--json"]
    got = answer(dpbam("calibrate", "--epsilon", 4, *arguments))
    assert got["epsilon"] <= 4
    less = got["noise_multiplier"] * 0.99
    assert answer(dpbam("epsilon", "--noise-multiplier", less, *arguments))["epsilon"] > 4


def test_calibrated_steps_keep_within_the_budget_and_one_more_does_not(dpbam):
    arguments = [*PAPER, "--noise-multiplier", 2, "--delta", 1e-5, "--accountant", "rdp", "--json"]
    got = answer(dpbam("calibrate", "--epsilon", 4, *arguments))
    assert got["epsilon"] <= 4
    more = answer(dpbam("epsilon", *arguments, "--steps", got["steps"] + 1))
    assert more["epsilon"] > 4


def test_no_noise_is_no_privacy(dpbam):
    got = answer(dpbam("epsilon", "--noise-multiplier", 0, *PAPER, "--steps", 1, "--json"))
    assert got["epsilon"] == "infinite"


def test_a_table_for_people(dpbam):
    ended = dpbam("epsilon", "--noise-multiplier", 1.731, *PAPER, "--steps", 1000, "--delta", 1e-5)
    assert ended.code == 0
    assert "7.999" in ended.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["epsilon", "--noise-multiplier", -1, *PAPER, "--steps", 1], "noise_multiplier"),
        (["epsilon", "--noise-multiplier", "nan", *PAPER, "--steps", 1], "NaN"),
        (["epsilon", "--noise-multiplier", 1, *PAPER], "--epochs or --steps"),
        (["epsilon", "--noise-multiplier", 1, *PAPER, "--steps", 1, "--epochs", 1], "not both"),
        (["epsilon", "--noise-multiplier", 1, "--steps", 1], "--sampling-rate"),
        (["epsilon", "--noise-multiplier", 1, "--sampling-rate", 0.1, "--steps", 1], "--delta"),
        (["epsilon", "--noise-multiplier", 1, "--sampling-rate", 1.5, "--steps", 1, "--delta",
          1e-5], "at most 1"),
        (["epsilon", "--noise-multiplier", 1, "--sampling-rate", 0, "--epochs", 1, "--delta",
          1e-5], "sampling-rate"),
        (["epsilon", "--noise-multiplier", 1, "--n", 10, "--batch-size", 20, "--steps", 1],
         "exceeds"),
        (["epsilon", "--noise-multiplier", 1, *PAPER, "--steps", 1, "--delta", 2], "--delta"),
        (["epsilon", "--noise-multiplier", 1, *PAPER, "--steps", 1, "--accountant", "pdl"],
         "did you mean 'pld'?"),
        (["epsilon"], "--noise-multiplier"),
        (["calibrate", "--epsilon", -1, *PAPER, "--steps", 1], "epsilon must be positive"),
        (["calibrate", "--epsilon", 1, *PAPER, "--steps", 1, "--noise-multiplier", 1],
         "the other is calculated"),
        (["calibrate", "--epsilon", "much", *PAPER, "--steps", 1], "--epsilon"),
        (["calibrate", "--epsilon", 1, *PAPER, "--step", 1], "--steps"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)  # fmt: skip
def test_bad_input_is_one_sentence(args, says, dpbam):
    ended = dpbam(*args)
    assert ended.code == 2
    assert ended.out == ""
    assert says in ended.err
    assert ended.err.startswith("error: ")
    assert len(ended.err.splitlines()) == 1
