"""Progress over several runs: weighted by what they cost, finished ones as lines."""

from __future__ import annotations

import pytest

from dpbam.app.cli.progress import RunsDisplay
from reproduce.command import relative_cost
from reproduce.records import missing
from tests.reproduce.tiny import tiny
from tests.results import finished


def test_costs_and_lines(tmp_path, capsys):
    jobs = missing([tiny(tmp_path)], tmp_path, 1)
    sgd, sat, bam = costs = [relative_cost(job) for job in jobs]
    assert sgd == sat == pytest.approx(0.2 * 1438 * 64)
    assert bam == pytest.approx(2.2 * sgd)
    with RunsDisplay([run.name for _, run in jobs], costs) as progress:
        progress.progress(0, 1, 4)
        progress.finished(1, finished("dp-sat", 0, 0.5))
        progress.progress(0, 0, 4)  # a late message does not move the bar back
        task = progress._bar.tasks[0]
        assert task.completed == pytest.approx(0.25 * sgd + sat)
        assert task.total == pytest.approx(sgd + sat + bam)
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert said == ["1/3 dp-sat-clip_norm-1-seed-0: 50.0% in 1 s"]
