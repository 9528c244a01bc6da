"""No screen or page shows an epsilon below the true one."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import dpbam
from dpbam.app.cli import compare, train
from dpbam.app.cli.output import facts
from dpbam.app.cli.progress import LiveReporter, _spent
from dpbam.app.report.groups import _short
from dpbam.app.report.records import Run
from dpbam.app.report.tables import _fact
from dpbam.app.report.training_figures import accuracy
from dpbam.estimates import estimate
from dpbam.privacy.rounding import down, up
from dpbam.training.events import EvaluationReport

TRICKY = [2.99999, 1.0001, 3.004, 0.123449, 7.99951, 1.00000001, 12345.6]


@given(st.floats(1e-9, 1e12), st.integers(1, 9))
def test_up_is_never_below_and_down_never_above(x: float, digits: int) -> None:
    assert float(up(x, digits)) >= x >= float(down(x, digits))
    assert math.isclose(float(up(x, digits)), x, rel_tol=10 ** (1 - digits))
    assert float(up(float(up(x, digits)), digits)) == float(up(x, digits))  # once is enough


def printed(*renderables: Any) -> str:
    screen = Console(file=io.StringIO(), width=200)
    for one in renderables:
        screen.print(one)
    return screen.file.getvalue()  # type: ignore[attr-defined]


def smallest(text: str) -> float:
    """The least number in a text."""
    return min(float(found) for found in re.findall(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?", text))


def screens(epsilon: float) -> dict[str, str]:
    """What each place that shows an epsilon shows of this one."""
    evaluation = EvaluationReport(step=1, epoch=99999.0, epsilon=epsilon, loss=1.0,
                                  scores={"accuracy": 900.0}, records=99999)  # fmt: skip
    lines: list[str] = []
    reporter = LiveReporter()
    reporter._say = lines.append  # type: ignore[method-assign]
    reporter.on_evaluation(evaluation)
    settings: Any = SimpleNamespace(
        private=True,
        epsilon=epsilon,
        release_counts=None,
        release_norms=None,
        release_centre=None,
        budget=None,
        seed=None,
    )
    result: Any = SimpleNamespace(
        epsilon=epsilon, delta=0.5, score=900.0, metric="accuracy", evaluations=[evaluation],
        status="complete", out="run", spec=SimpleNamespace(config=settings),
    )  # fmt: skip
    contender = SimpleNamespace(arm="bam", epsilon=epsilon, seconds=1.0, score=0.5)
    compared: Any = SimpleNamespace(
        runs=[contender],
        metric="accuracy",
        mean=lambda name: estimate([1.0, 1.0]),
        diverged=lambda arm: 0,
        scores=lambda arm: {0: 0.5},
    )
    group: Any = SimpleNamespace(
        label="a", colour="b",
        runs=[Run("a", {"method": "bam"}, metrics=(
            {"epsilon": epsilon, "accuracy": 0.5, "epoch": 1.0},))],
    )  # fmt: skip
    point: Any = accuracy([group]).panels[1]
    return {
        "calculators": printed(facts({"epsilon": epsilon})),
        "progress": _spent(epsilon, epsilon),
        "evaluation": lines[0].split("epsilon")[1],
        "summary": str(train._summary(result, settings)["epsilon"]).split(" at ")[0],
        "comparison": compare._mean(compared, "bam")[1],
        "report, label": _short("epsilon", epsilon),
        "report, setting": _fact("epsilon", epsilon),
        "report, curve": f"{point.rows[0]['x']:.3g}",
    }


@pytest.mark.parametrize("epsilon", TRICKY)
def test_no_screen_shows_less(epsilon: float) -> None:
    for place, text in screens(epsilon).items():
        assert smallest(text) >= epsilon, (place, text)


# an epsilon with a format of its own, or handed to the helper that rounds to the nearest
_ROUNDED = re.compile(
    r"\{[^{}]*epsilon(\(\)|'\]|\"\])?:[^{}]*[efg]\}|\bnumber\([^()]*epsilon|\bround\([^()]*epsilon"
)


def rounded_to_nearest(source: str) -> list[str]:
    lines = [line.strip() for line in source.splitlines()]
    return [line for line in lines if _ROUNDED.search(line) and not line.startswith(">>>")]


def test_no_source_formats_an_epsilon_by_itself() -> None:
    folder = Path(dpbam.__file__).parent
    found = {str(p): rounded_to_nearest(p.read_text()) for p in folder.rglob("*.py")}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    ['f"epsilon {result.epsilon:.4g}"', "f\"{budget['epsilon']:g}\"", 'f"{plan.epsilon():.2f}"',
     "number(result.epsilon)", "round(self.epsilon, 2)"],
)  # fmt: skip
def test_a_planted_rounding_is_found(line: str) -> None:
    assert rounded_to_nearest(line)
