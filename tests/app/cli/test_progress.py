"""Progress over several runs: weighted by what they cost, finished ones as lines."""

from __future__ import annotations

import pytest

from dpbam.app.cli.progress import RunsDisplay, cost
from dpbam.app.runs import RunConfig
from tests.results import finished


def test_costs_and_lines(capsys):
    methods = ("dp-sgd", "dp-sat", "bam")
    configs = [RunConfig(method=method, epsilon=3.0, epochs=0.2) for method in methods]
    sgd, sat, bam = costs = [cost(config) for config in configs]
    assert sgd == sat == pytest.approx(0.2)
    assert bam == pytest.approx(2.2 * sgd)
    with RunsDisplay([f"{method}-seed-0" for method in methods], costs) as progress:
        progress.progress(0, 1, 4)
        progress.finished(1, finished("dp-sat", 0, 0.5))
        progress.progress(0, 0, 4)  # a late message does not move the bar back
        task = progress._bar.tasks[0]
        assert task.completed == pytest.approx(0.25 * sgd + sat)
        assert task.total == pytest.approx(sgd + sat + bam)
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert said == ["1/3 dp-sat-seed-0: 50.0% in 1 s"]
