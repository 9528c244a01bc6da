"""Progress over many runs: weighted by what they cost, finished ones as lines."""

from __future__ import annotations

import pytest

from dpbam.app.compare.pool import FinishedRun
from reproduce.jobs import missing
from reproduce.progress import Overall, weight
from tests.reproduce.tiny import tiny


def test_weights_and_lines(tmp_path, capsys):
    jobs = missing([tiny(tmp_path)], tmp_path, 1)
    sgd, sat, bam = (weight(job) for job in jobs)
    assert sgd == sat == pytest.approx(0.2 * 1438 * 64)
    assert bam == pytest.approx(2.2 * sgd)
    done = FinishedRun("dp-sat", 0, 0.5, 3.0, 1e-4, 1.0, 0.1, "pld", 10, 1.0, "out", {})
    with Overall(jobs) as overall:
        overall.progress(0, 1, 4)
        overall.finished(1, done)
        overall.progress(0, 0, 4)  # a late word does not turn the bar back
        task = overall._bar.tasks[0]
        assert task.completed == pytest.approx(0.25 * sgd + sat)
        assert task.total == pytest.approx(sgd + sat + bam)
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert said == ["1/3 dp-sat-clip_norm-1-seed-0: 50.0% in 1 s"]
