from __future__ import annotations

from pathlib import Path

import pytest

from dpbam.app.cli import main
from dpbam.app.report import ReportError, draw, write_report
from dpbam.catalogue import FIGURES
from tests.app.report.synthetic import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first", epochs=3)


def test_each_figure_is_written_as_pdf_and_csv(tmp_path: Path) -> None:
    bare = write_run(tmp_path / "bare", measured=False, evaluated=False)
    page = write_report([bare], tmp_path / "out", figures=tmp_path / "figures")
    assert page == tmp_path / "out" / "report.html"
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"accuracy.pdf", "accuracy.csv", "loss.pdf", "loss.csv"}


def test_data_are_written_in_full(tmp_path: Path) -> None:
    long = write_run(tmp_path / "long", epochs=50)
    csv = draw("bias", [long], tmp_path / "bias.csv").read_text()
    assert csv.startswith("# not protected by privacy: do not share\npanel,series,x,y,low,high\n")
    assert len(csv.splitlines()) == 2 + 2 * 500  # two readings of every step, none thinned


def test_publishable_figures_hold_nothing_else(folder: Path, tmp_path: Path) -> None:
    write_report([folder], tmp_path / "a.html", publishable=True, figures=tmp_path / "none")
    released = {"released-norms", "released-clipping"}
    assert {p.stem for p in (tmp_path / "none").iterdir()} == released
    bare = write_run(tmp_path / "bare", evaluated=False)
    write_report([bare], tmp_path / "b.html", publishable=True, public_test_data=True,
                 figures=tmp_path / "some")  # fmt: skip
    assert {p.stem for p in (tmp_path / "some").iterdir()} == {"accuracy", *released}


@pytest.mark.parametrize(
    ("file", "magic"),
    [
        ("accuracy.pdf", b"%PDF"),
        ("direction.svg", b"<svg"),
        ("norms.png", b"\x89PNG"),
        ("confusion.svg", b"<svg"),
        ("groups.png", b"\x89PNG"),
        ("layers.svg", b"<svg"),
    ],
)
def test_one_figure_alone(folder: Path, tmp_path: Path, file: str, magic: bytes) -> None:
    drawn = draw(Path(file).stem, [folder], tmp_path / file).read_bytes()
    assert drawn.startswith(magic)
    assert len(drawn) > 5_000


def test_a_drawing_carries_its_mark_and_is_reproducible(folder: Path, tmp_path: Path) -> None:
    first = draw("bias", [folder], tmp_path / "a.svg").read_text()
    assert "not protected by privacy: do not share" in first
    assert draw("bias", [folder], tmp_path / "b.svg").read_text() == first
    released = draw("released-clipping", [folder], tmp_path / "c.svg").read_text()
    assert "not protected" not in released


def test_what_cannot_be_drawn_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"must end in \.pdf, \.svg or \.png"):
        draw("bias", [folder], tmp_path / "a.gif")
    with pytest.raises(ReportError, match="did you mean 'bias'"):
        draw("biass", [folder], tmp_path / "a.pdf")
    for ending in ("pdf", "csv"):
        with pytest.raises(ReportError, match="need two settings"):
            draw("differences", [folder], tmp_path / f"a.{ending}")
    with pytest.raises(ReportError, match="name the runs"):
        draw("bias", [], tmp_path / "a.pdf")
    with pytest.raises(ReportError, match="at least one run"):
        write_report([], tmp_path / "a.html")


def test_the_operators_page_is_in_the_non_private_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder)]) == 0
    page = folder / "non-private" / "report.html"
    said = capsys.readouterr()
    assert "".join(said.out.split()) == str(page)
    assert "operator only" in said.err
    assert page.exists()
    assert main(["report", str(folder), "--publishable"]) == 0
    assert (folder / "report-publishable.html").exists()


def test_several_runs_by_a_pattern_with_files_among_them(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "second", method="dp-sgd", epochs=3)
    stray = tmp_path / "comparison.json"
    stray.write_text("{}")
    out = tmp_path / "page.html"
    assert main(["report", str(folder), str(other), str(stray), "--out", str(out)]) == 0
    assert "BAM and DP-SGD on scans" in out.read_text()


def test_a_comparisons_page_lies_beside_its_runs(tmp_path: Path) -> None:
    for method in ("dp-sgd", "sgd"):
        write_run(tmp_path / method / "seed-0", method=method, seed=0, epochs=1)
    assert main(["report", str(tmp_path)]) == 0
    assert "DP-SGD and SGD on scans" in (tmp_path / "report.html").read_text()


def test_the_plot_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plots" / "bias.csv"
    assert main(["plot", "bias", str(folder), "--out", str(out)]) == 0
    assert out.read_text().startswith("# not protected by privacy")
    assert main(["plot", "bais", str(folder), "--out", str(out)]) == 2
    assert "did you mean 'bias'" in capsys.readouterr().err


def test_the_help_names_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--help"]) == 0
    text = "".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(name in text for name in FIGURES)
