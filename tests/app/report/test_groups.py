from __future__ import annotations

import pytest

from dpbam.app.report.groups import curves, groups
from dpbam.app.report.records import Run


def make(name: str, **config: object) -> Run:
    return Run(name, dict(config), {})


def test_runs_that_differ_in_their_seed_are_one_group() -> None:
    found = groups([make(str(k), method="bam", seed=k, device=f"cuda:{k}") for k in range(3)])
    assert [(g.label, len(g.runs)) for g in found] == [("BAM", 3)]


def test_labels_name_what_tells_groups_of_a_method_apart() -> None:
    runs = [
        make("a", method="dp-sgd", lam=0.02, batch_size=256),
        make("b", method="dp-sgd", lam=0.02, batch_size=512),
        make("c", method="bam", lam=0.02, batch_size=256),
    ]
    assert [g.label for g in groups(runs)] == [
        "DP-SGD, batch size 256", "DP-SGD, batch size 512", "BAM",
    ]  # fmt: skip
    assert [g.colour for g in groups(runs)] == [0, 1, 2]


def test_runs_on_other_data_are_never_averaged() -> None:
    statements = [{"evaluated_on": {"set": f"{name}/test"}} for name in ("mnist", "scans")]
    runs = [Run(str(k), {"method": "bam"}, s) for k, s in enumerate(statements)]
    found = groups(runs)
    assert len(found) == 2
    assert len({g.label for g in found}) == 2


def test_seeds_are_drawn_faintly_behind_their_mean() -> None:
    found = groups([make("a", method="bam", seed=1), make("b", method="bam", seed=2)])
    heights = {"a": (1.0, 3.0), "b": (3.0, 5.0)}
    drawn = curves(found, lambda run: ((0.0, 1.0), heights[run.name]))
    assert [s.style for s in drawn] == ["seed", "seed", "line"]
    assert {s.group or s.label for s in drawn} == {"BAM"}  # one name in the legend
    assert drawn[-1].y == (2.0, 4.0)


def test_the_mean_is_taken_only_where_all_runs_have_a_point() -> None:
    found = groups([make("a", method="bam", seed=1), make("b", method="bam", seed=2)])
    points = {"a": ((0.0, 1.0, 2.0), (1.0, 1.0, 1.0)), "b": ((1.0,), (3.0,))}
    mean = curves(found, lambda run: points[run.name])[-1]
    assert (mean.x, mean.y) == ((1.0,), (2.0,))


def test_a_run_without_points_is_left_out() -> None:
    found = groups([make("a", method="bam"), make("b", method="dp-sgd")])
    drawn = curves(found, lambda run: ((0.0,), (1.0,)) if run.name == "b" else ((), ()))
    assert [(s.label, s.colour) for s in drawn] == [("DP-SGD", 1)]
    assert drawn[0].y == pytest.approx((1.0,))
