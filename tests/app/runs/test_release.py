"""Statistics that a run releases with its gradients: noised, charged jointly, and published."""

import json

import pytest

from dpbam.app.audit.check import check_run
from dpbam.app.runs import RunConfig, execute, prepare
from dpbam.app.runs.config import ConfigError
from dpbam.privacy.ledger import Ledger


@pytest.fixture
def releasing(tiny: RunConfig) -> RunConfig:
    return tiny.replace(release_norms=20.0)


def released(folder):
    return [json.loads(line) for line in (folder / "statistics.jsonl").read_text().splitlines()]


def test_every_step_releases_and_the_ledger_is_charged_for_both(releasing, tmp_path):
    result = execute(releasing, tmp_path / "run")
    rows = released(result.out)
    assert [row["step"] for row in rows] == list(range(8))
    assert rows[0]["count_std"] == 20.0
    joint = (4.0**-2 + 20.0**-2) ** -0.5
    ledger = Ledger(1e-4, "rdp", result.out / "ledger.jsonl")
    assert [c.noise_multiplier for c in ledger.charges()] == [pytest.approx(joint)]
    assert result.epsilon > execute(releasing.replace(release_norms=None),
                                    tmp_path / "other").epsilon  # fmt: skip


def test_a_budget_is_kept_with_the_statistics_in_it(releasing):
    config = releasing.replace(noise_multiplier=None, epsilon=1.0)
    plan = prepare(config).plan
    alone = prepare(config.replace(release_norms=None)).plan
    assert plan.epsilon() <= 1.0
    assert plan.noise_multiplier > alone.noise_multiplier


def test_the_audit_and_the_statement_know_of_them(releasing, tmp_path):
    out = execute(releasing, tmp_path / "run").out
    statement = json.loads((out / "privacy-statement.json").read_text())
    assert "statistics.jsonl" in statement["may_be_published"]
    assert "with noise of sigma 20" in statement["released_beside_the_gradients"]
    assert [f.check for f in check_run(out) if not f.right] == []


def test_the_audit_finds_statistics_that_were_not_paid_for(releasing, tmp_path):
    out = execute(releasing, tmp_path / "run").out
    ledger = out / "ledger.jsonl"
    lines = [
        json.loads(line) | {"noise_multiplier": 4.0} for line in ledger.read_text().splitlines()
    ]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [f.check for f in check_run(out) if not f.right]


def test_a_resumed_run_releases_each_step_once(releasing, tmp_path):
    whole = execute(releasing, tmp_path / "whole").out
    half = execute(releasing.replace(epochs=0.5), tmp_path / "half").out
    execute(releasing, half, resume=True)
    assert released(half) == released(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"release_norms": 0.0}, "release_norms"),
     ({"method": "sgd", "noise_multiplier": None}, "release_norms needs noise")],
)  # fmt: skip
def test_what_cannot_be_released_is_refused(releasing, changes, words):
    with pytest.raises(ConfigError, match=words):
        releasing.replace(**changes)
