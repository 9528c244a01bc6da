from __future__ import annotations

from pathlib import Path

import pytest

from dpbam.app.report.groups import groups
from dpbam.app.report.records import read_run
from dpbam.app.report.statement import privacy
from dpbam.privacy.accounting import Charge, total_epsilon
from tests.app.report.synthetic import write_run


def test_one_run_in_full_rounded_up(tmp_path: Path) -> None:
    view = privacy(groups([read_run(write_run(tmp_path / "a"))]))
    assert view.epsilon == "2.977"  # of 2.97654: never below the truth
    assert view.promise == "at δ = 0.0001, for every record (one image and its label)"
    assert view.share == 99.3  # of 99.218, shown with one digit
    assert dict(view.facts.rows)["units"] == "1000"
    assert view.publishable == ("model.safetensors", "privacy-statement.json")
    assert view.perhaps == ("metrics.jsonl",)
    assert "non-private/" in view.withheld
    assert view.warnings == ()
    assert view.facts.differing == 0


def test_models_of_the_same_data_add_up(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / m, method=m) for m in ("dp-sgd", "bam", "sgd")]
    view = privacy(groups([read_run(f) for f in folders]))
    together = total_epsilon(
        [Charge(1.4958, 0.1, 60)] * 2, 1e-4, accountant="rdp"
    )  # as charged, released statistics included; the reference has no noise
    assert float(view.epsilon) == pytest.approx(together, rel=1e-3)
    assert float(view.epsilon) >= together
    assert "if all 2 private models are published" in view.promise
    assert ("epsilon", "2.977", "2.977", "infinite") in view.facts.rows


def test_warnings_come_first(tmp_path: Path) -> None:
    seeded = privacy(groups([read_run(write_run(tmp_path / "a", seed=1))]))
    assert [title for title, _ in seeded.warnings] == ["Research only"]
    reference = privacy(groups([read_run(write_run(tmp_path / "b", method="sgd"))]))
    assert (reference.epsilon, reference.share) == ("∞", None)
    assert [title for title, _ in reference.warnings] == ["No privacy"]
    half = privacy(groups([read_run(write_run(tmp_path / "c", finished=False))]))
    assert [title for title, _ in half.warnings] == ["Not finished"]
