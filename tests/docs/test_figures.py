"""The pictures of the first page are what their script draws, from numbers that it computes."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures_tool", ROOT / "tools" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures_tool"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "title", "arrows"),
    [
        ("clipping.svg", "Clipping puts in a bias", "PLAIN"),
        ("bam.svg", "BAM: there is less to clip", "PENALISED"),
    ],
)
def test_the_drawings_are_up_to_date(
    figures: ModuleType, name: str, title: str, arrows: str
) -> None:
    drawn = figures.drawing(title, getattr(figures, arrows))
    assert drawn == (figures.OUT / name).read_text(), "run make figures"


def test_what_is_drawn_is_clipping(figures: ModuleType) -> None:
    """Cut to C where longer, untouched where not; the printed bias is between the two means."""
    g = figures.PLAIN
    cut = figures.clipped(g)
    long = np.linalg.norm(g, axis=1) > figures.C
    assert long.any()
    assert not long.all()
    np.testing.assert_allclose(np.linalg.norm(cut[long], axis=1), figures.C)
    np.testing.assert_array_equal(cut[~long], g[~long])
    bias = np.linalg.norm(cut.mean(0) - g.mean(0))
    assert f"length {bias:.2f}" in figures.drawing("", g)


def test_the_measured_curve_is_the_mean_of_the_records(figures: ModuleType, tmp_path: Path) -> None:
    for seed, bias in enumerate((1.0, 3.0)):
        steps = [{"step": s, "non_private_against_plain": {"bias": bias + s}} for s in (0, 5)]
        row = {"run": f"dp-sgd-seed-{seed}", "non_private_bias": steps}
        with (tmp_path / "methods.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    curves = figures.curves_of(tmp_path / "methods.jsonl")
    assert list(curves) == ["dp-sgd"]
    steps, mean, seeds = curves["dp-sgd"]
    assert steps.tolist() == [0.0, 5.0]
    assert mean.tolist() == [2.0, 7.0]
    assert seeds == 2
    assert "DP-SGD (2 seeds)" in figures.measured(curves)


def test_every_picture_is_valid_and_named(figures: ModuleType) -> None:
    for path in figures.OUT.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert root.attrib["aria-label"]
        assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", "")


def test_the_page_says_what_the_records_of_the_public_encoder_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = runpy.run_path(str(ROOT / "examples" / "public_encoder.py"))
    study["table"]()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    gains = {
        row[0].lstrip("| "): row[2].split()[0] for row in rows if len(row) > 2 and row[2].strip()
    }
    assert round(float(gains["head"])) == round(float(gains["LoRA"])) == 9
    text = " ".join((ROOT / "docs" / "how-good.md").read_text().split())
    assert "worth nine points, and a head alone gets all of them" in text
    assert len(study["records"]("compare")) == len(study["ARMS"]) * len(study["SEEDS"])
