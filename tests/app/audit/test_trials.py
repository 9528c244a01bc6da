"""Trials: each once, in order, from several processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from dpbam.app.audit.trials import Trial, collect


@dataclass(frozen=True)
class Nothing:
    """A target that costs nothing."""

    name: str = "nothing"


def play(target: Nothing, number: int) -> Trial:
    return Trial(number, [number % 2 == 1], [float(os.getpid())])


@pytest.mark.slow  # each process imports torch
def test_processes_share_the_trials_and_keep_their_order(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    trials = collect(
        play, Nothing(), 120, jobs=2, out=tmp_path, progress=lambda *said: told.append(said)
    )
    assert [t.number for t in trials] == list(range(120))
    assert os.getpid() not in {t.scores[0] for t in trials}
    assert told == [(50, 120), (100, 120), (120, 120)]
    again = collect(play, Nothing(), 120, jobs=2, out=tmp_path, progress=lambda *said: None)
    assert again == trials
