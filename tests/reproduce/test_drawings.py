"""The paper's drawings: their numbers against the records that they are drawn from."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from dpbam.app.report.charts import Series, dots
from dpbam.app.report.figure import Figure, Panel, picture
from dpbam.app.report.groups import Group, groups
from dpbam.app.report.records import read_run
from reproduce import drawings
from tests.app.report.synthetic import write_run


@pytest.fixture
def three(tmp_path: Path) -> tuple[Group, ...]:
    folders = [write_run(tmp_path / m, method=m) for m in ("dp-sgd", "dp-sat", "bam")]
    return groups([read_run(folder) for folder in folders])


def vectors(panel: Panel) -> dict[str, tuple[float, float]]:
    """Role -> vector, of those in the CSV file."""
    return {
        row["vector"]: (row["x_to"] - row["x_from"], row["y_to"] - row["y_from"])
        for row in panel.rows
    }


def test_figure_seven_is_drawn_to_scale(three: tuple[Group, ...]) -> None:
    panel = drawings.decomposition(three).panels[2]
    found = vectors(panel)
    bias, length, sideways = found["bias"], found["magnitude"], found["direction"]
    assert bias == pytest.approx((length[0] + sideways[0], length[1] + sideways[1]))
    ends = [row["non_private_against_plain"] for row in three[2].runs[0].bias[-6:]]
    assert 1 + length[0] == pytest.approx(sum(r["a"] for r in ends) / 6)
    ratio = sum(r["c_norm"] / r["reference_norm"] for r in ends) / 6
    assert sideways == pytest.approx((0, ratio))
    x, y = (panel.view["encoding"][axis]["scale"]["domain"] for axis in "xy")
    for layer in (panel.view, *panel.view["layer"]):
        for row in layer.get("data", {}).get("values", ()):
            for at, (low, high) in (("x", x), ("y", y), ("x_to", x), ("y_to", y)):
                assert low <= row.get(at, low) <= high
    width, height = panel.view["width"], panel.view["height"]
    assert width / (x[1] - x[0]) == pytest.approx(height / (y[1] - y[0]))


def test_a_short_clipped_gradient_is_drawn_again_enlarged(three: tuple[Group, ...]) -> None:
    panel = drawings.decomposition(three).panels[0]  # DP-SGD: a = 0.2, |c| = 0.1
    drawn = panel.view["data"]["values"]
    small, large = drawn[3], drawn[-1]
    assert large["label"] == "g clip, 2×"
    assert len(panel.rows) == 5  # the data know nothing of it
    grown = (large["x_to"] - large["x_from"], large["y_to"] - large["y_from"])
    assert grown == pytest.approx((2 * small["x_to"], 2 * small["y_to"]), rel=1e-3)
    assert len(drawings.decomposition(three).panels[2].view["data"]["values"]) == 5


def test_where_nothing_is_clipped_there_is_nothing_to_take_apart(tmp_path: Path) -> None:
    figure = drawings.decomposition(groups([read_run(write_run(tmp_path / "r", method="sgd"))]))
    assert not figure.panels
    assert figure.missing.startswith("Nothing was clipped")


def test_batch_sizes_need_two_and_are_in_order(tmp_path: Path, three: tuple[Group, ...]) -> None:
    assert not drawings.batch_size(three).panels
    folders = [write_run(tmp_path / f"b{b}", method="dp-sgd", batch_size=b) for b in (200, 50)]
    panel = drawings.batch_size(groups([read_run(f) for f in folders])).panels[0]
    assert [row["x"] for row in panel.rows] == [50.0, 200.0]


def test_the_longest_name_fits_in_a_wide_font() -> None:
    wide = pytest.importorskip("PIL.ImageFont")
    font = Path("/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf")
    if not font.exists():
        pytest.skip("DejaVu Sans is not installed")
    names = ("MLP, CIFAR-10 8x8, 600 steps, decaying rate (8)", "WWW mmm 100% (8)", "A", "fill it")
    measure = wide.truetype(str(font), 1000).getlength
    for name in names:
        assert measure(name) / 1000 <= drawings.text_width(name) <= 1.5 * measure(name) / 1000
    values = Series("", 0, names[:1], (1.0,))
    panel = drawings.with_zero_line(dots("", "points", [values], percent=False))
    (left,) = re.findall(r'stroke-miterlimit="10" transform="translate\((\d+),', svg(panel))
    assert int(left) >= 11 * measure(names[0]) / 1000 + 7


def svg(panel: Panel) -> str:
    return picture(Figure("", "", "", "public", [panel]).spec(), ".svg").decode()


def test_figure_one_is_the_bias_of_its_own_vectors() -> None:
    (panel,) = drawings.clipping().panels
    by_role: dict[str, list[tuple[float, float]]] = {}
    for row in panel.rows:
        by_role.setdefault(row["vector"], []).append((row["x_to"], row["y_to"]))
    assert all(math.hypot(*cut) <= 1 + 1e-9 for cut in by_role["cut"])
    (k1, k2), (clipped,) = by_role["cut"], by_role["clipped"]
    assert clipped == pytest.approx(((k1[0] + k2[0]) / 2, (k1[1] + k2[1]) / 2))
    assert by_role["bias"] == [clipped]


@pytest.mark.parametrize(("norm", "bias"), [(1.0, 0.67), (2.4, 0.0)])
def test_figure_one_shows_the_bias_of_any_clipping_norm(norm: float, bias: float) -> None:
    scene = drawings.clipped_at(norm)
    (drawn,) = [math.dist(a.start, a.end) for a in scene.arrows if a.role == "bias"]
    assert drawn == pytest.approx(bias, abs=0.005)
    cut = [math.dist(a.start, a.end) for a in scene.arrows if a.role == "cut"]
    assert max(cut) <= norm + 1e-9


def test_without_a_plain_reading_the_own_one_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sat", method="dp-sat", plain=False)
    panel = drawings.decomposition(groups([read_run(folder)])).panels[0]
    assert panel.title == "DP-SAT (against its own gradient)"
