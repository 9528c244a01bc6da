"""The study of the bias, on digits and a small net: restartable, paired, one file a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbam.experiments import bias_figures
from dpbam.experiments.bias_figures import Arm, Setting, last_quarter, study, summary

SETTING = Setting(
    data="digits", images=200, halve=False, model="mlp", batch_size=50, epochs=1.0, every=2,
    engine="auto", flatness_images=20,
)  # fmt: skip
ARMS = (Arm("dp-sgd", "dp-sgd"), Arm("bam", "bam", 0.05), Arm("dp-sat", "dp-sat", 0.1))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, list[dict]]:
    out = tmp_path_factory.mktemp("study")
    return out, study(ARMS, (0, 1), SETTING, out)


def test_one_file_a_run_with_what_the_figures_need(finished) -> None:
    out, records = finished
    assert len(list(out.glob("*.json"))) == len(records) == 6
    assert not list(out.glob("*.part"))
    for record in records:
        assert record["epsilon"] <= 8
        assert [step["step"] for step in record["non_private_bias"]] == [0, 2]
        assert record["non_private_bias"][1]["non_private_against_plain"]["bias"] > 0
        assert record["non_private_flatness"]["non_private_top_eigenvalue"] > 0
    alignments = {r["arm"]["name"]: r["non_private_bias"][1]["non_private_alignment"]
                  for r in records}  # fmt: skip
    assert alignments["dp-sgd"] is None
    assert alignments["bam"] is not None
    assert alignments["dp-sat"] is not None


def test_seeds_are_paired_and_noise_is_not_shared(finished) -> None:
    """At step 0 all arms of a seed see the same batch at the same weights; releases differ."""
    _, records = finished
    readings = {
        (r["arm"]["name"], r["seed"]): r["non_private_bias"][0]["non_private_against_plain"]
        for r in records
    }
    first = [reading for (_, seed), reading in readings.items() if seed == 0]
    assert len({reading["reference_norm"] for reading in first}) == 1
    assert len({reading["private_cosine"] for reading in first}) == 3
    assert readings["bam", 1]["reference_norm"] != first[0]["reference_norm"]


def test_finished_runs_are_not_repeated(finished, monkeypatch) -> None:
    out, records = finished
    monkeypatch.setattr(bias_figures, "train_and_measure", None)  # would fail if it were called
    assert study(ARMS, (0, 1), SETTING, out) == records


def test_the_table_has_paired_differences(finished) -> None:
    _, records = finished
    lines = summary(records).splitlines()
    assert len(lines) == 2 + 3
    assert lines[2].startswith("| dp-sgd | 2 |")
    assert "+0.0% [+0.0%, +0.0%]" in lines[2]
    one = summary([r for r in records if r["seed"] == 0])
    assert "nan" not in one


def test_the_last_quarter_is_a_mean_over_the_end() -> None:
    steps = [{"non_private_against_plain": {"bias": float(k)}} for k in range(8)]
    assert last_quarter({"non_private_bias": steps}, "bias") == 6.5


def test_records_are_rounded_and_readable(finished) -> None:
    out, _ = finished
    text = (out / "bam-seed-0.json").read_text()
    assert json.loads(text)["arm"]["lam"] == 0.05
    assert len(text) < 20_000
