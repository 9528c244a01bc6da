"""Attacks on a released model: limits that hold, a curve that is not exceeded, files that stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpbam.app.audit import attack_run
from dpbam.app.audit.membership import Attack, MembershipResult, halves, likelihood_ratios, save_roc
from dpbam.app.cli import main
from dpbam.app.runs import RunConfig, RunError, execute
from dpbam.privacy.accounting import Charge
from dpbam.privacy.tradeoff import trade_off

CONFIG = RunConfig(
    data="digits", model="mlp", method="dp-sgd", noise_multiplier=1.0, epochs=1, batch_size=400,
    engine="functional", num_workers=0, ema=0.9,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("attacked") / "run"
    execute(CONFIG, out)
    return out


def gaussian_attack(separation: float, seed: int, count: int = 1000) -> Attack:
    rng = np.random.default_rng(seed)
    return Attack("a", rng.normal(separation, 1, count), rng.normal(0, 1, count))


def result(attack: Attack, mu: float | None) -> MembershipResult:
    """The attack against a mechanism of mu-Gaussian DP."""
    curve = None if mu is None else trade_off([Charge(1 / mu, 1.0, 1)])
    return MembershipResult(Path("run"), 1.0, 1e-5, [attack], curve, 0.95, 0)


def test_lower_limits_exceed_the_true_rate_no_more_often_than_allowed() -> None:
    """An attack that reaches G_1 exactly: 1 - f(0.1) = Phi(1 - 1.28...)."""
    truth = norm.cdf(norm.ppf(0.1) + 1)
    rates = [gaussian_attack(1.0, seed).rate(0.1, 0.05, truth) for seed in range(200)]
    wrong = sum(r.least > truth for r in rates)
    assert wrong <= binom.ppf(0.999, 200, 0.1)  # each of two limits fails with 0.05
    assert all(r.false_positives is not None and r.false_positives < 100 for r in rates)
    assert np.mean([r.least for r in rates]) > 0.25  # of 0.39


def test_an_attack_above_the_curve_refutes_it_and_one_below_does_not() -> None:
    assert not result(gaussian_attack(1.0, 0), 1.0).violated
    refuted = result(gaussian_attack(3.0, 0), 1.0)
    assert refuted.violated
    assert "refuted" in refuted.verdict
    assert not result(gaussian_attack(3.0, 0), None).violated  # nothing was promised


def test_leaking_scores_are_above_chance() -> None:
    assert not result(gaussian_attack(0.0, 1), 1.0).above_chance
    assert result(gaussian_attack(1.0, 1), 1.0).above_chance


def test_too_few_non_members_show_nothing_at_a_low_level() -> None:
    rate = gaussian_attack(5.0, 0, count=50).rate(0.01, 0.01, 1.0)
    assert rate.false_positives is None
    assert rate.least == 0.0


def test_each_record_is_in_half_of_the_shadow_models() -> None:
    inside = halves(301, 6)
    assert (inside.sum(0) == 3).all()
    assert inside.sum(1).min() > 100


def test_likelihood_ratios_find_members_that_a_threshold_does_not() -> None:
    """Records differ by far more than membership moves them."""
    rng = np.random.default_rng(0)
    own, members = rng.normal(0, 20, 400), np.arange(400) < 200
    inside = halves(400, 8)
    shadows = own + 2.0 * inside + rng.normal(size=(8, 400))
    released = own + 2.0 * members + rng.normal(size=400)
    for scores, least, most in ((released, -0.1, 0.2), (None, 0.5, 1.0)):
        s = likelihood_ratios(released, shadows, inside) if scores is None else scores
        above = (s[members][:, None] > s[~members]).mean()  # the area under the curve
        assert least < 2 * above - 1 < most


def test_a_private_run_is_attacked_and_stands(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run), "--attack", "--shadows", "0", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["non_private_rates"]) == {"loss", "gradient"}
    assert (run / "non-private" / "attack.png").stat().st_size > 1000
    assert not list(run.glob("attack*"))  # nothing where files may be published
    elsewhere = ["--out", str(tmp_path / "a")]
    assert main(["audit", str(run), "--attack", "--shadows", "0", *elsewhere]) == 0
    assert "Other attacks may do better" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow  # trains four shadow models
def test_shadow_models_attack_the_released_model(run: Path, tmp_path: Path) -> None:
    found = attack_run(run, shadows=4)
    assert [a.name for a in found.attacks][2:] == ["loss, shadow models", "gradient, shadow models"]
    assert not found.violated
    assert all(np.isfinite(a.members).all() and np.isfinite(a.others).all() for a in found.attacks)
    save_roc([found], tmp_path / "roc.svg")


@pytest.mark.slow
def test_what_cannot_be_attacked_is_refused_in_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "--attack"]) == 2
    assert "RUN" in capsys.readouterr().err
    with pytest.raises(ValueError, match="even number"):
        attack_run(run, shadows=3)
    with pytest.raises(RunError):
        attack_run(tmp_path)
    hostile = Path(shutil.copytree(run, tmp_path / "hostile"))
    facts = json.loads((hostile / "non-private" / "run.json").read_text())
    facts["config"]["data"] = "os:mkdir"
    (hostile / "non-private" / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match=r"names code to run, data os:mkdir.*--own-code"):
        attack_run(hostile)


def test_an_attack_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="needs the folder of a finished run"):
        attack_run(tmp_path)
