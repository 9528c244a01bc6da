"""The page as one file: what may be in it, what is not, and which figures are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.app.cli import main
from dpbam.app.report import ReportError, draw, write_report
from dpbam.app.report.html import _environment, render
from dpbam.app.report.records import Run, read_run
from dpbam.catalogue import FIGURES
from tests.app.report.synthetic import CLASSES, SECRET, Page, write_run

NASTY = '</script><img src=x onerror="window.pwned=1"><!-- \'&'


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(write_run(tmp_path / "ward-seven"))


def test_the_page_stands_alone(run: Run) -> None:
    text = render([run])
    page = Page(text)
    assert all(a.startswith("#") or a == "data:," for a in page.addresses)
    assert "@import" not in text
    assert "url(http" not in text
    assert "default-src 'none'" in text
    assert "unsafe-inline'; script-src 'sha256-" in text  # one script, known by its hash


RELEASED = {"released-norms", "released-clipping"}
PUBLIC = RELEASED


def test_every_panel_is_there_with_its_data_and_its_mark(run: Run) -> None:
    text = render([run])
    page = Page(text)
    assert page.figures == set(page.data)
    assert {"accuracy", "bias", "direction", "norms", "confusion", "groups"} <= page.figures
    for name in page.figures:
        card = text[text.index(f'id="figure-{name}"') :]
        head = card[: card.index("</header>")]
        about_test = name in ("accuracy", "classes", "confusion", "groups")
        mark = "test records: publish only if public" if about_test else "not protected by privacy"
        assert (mark in head) == (name not in PUBLIC), name
        assert page.data[name]["title"]["text"].startswith(mark) == (name not in PUBLIC), name


def test_publishable_leaves_out_panels_and_their_data(run: Run) -> None:
    text = render([run], publishable=True)
    assert set(Page(text).data) == PUBLIC
    for leak in ("non_private", "figure-bias", "figure-norms", *CLASSES, run.name, "/home/alice"):
        assert leak not in text, leak
    assert "not protected by privacy: do not share" not in text.split("<script")[0]


def test_the_leaks_looked_for_are_in_the_operators_page(run: Run) -> None:
    """The control of the test above: it could find them."""
    text = render([run])
    for leak in ("figure-bias", "figure-norms", *CLASSES, run.name, "/home/alice"):
        assert leak in text, leak
    loss = Page(text).data["loss"]
    assert f"{SECRET:.5g}" in json.dumps(loss)


def test_public_test_data_keep_accuracy_alone(run: Run) -> None:
    page = Page(render([run], publishable=True, public_test_data=True))
    assert page.figures == {"accuracy", "classes", "confusion", "groups"} | PUBLIC
    assert all(f["title"]["text"] == "" for f in page.data.values())


def test_a_seed_is_never_published(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run-90210", seed=90210))
    assert run.config["seed"] == 90210
    assert run.name in render([run])
    other = replace(run, name="run-1", config={**run.config, "seed": 1})
    public, others = (
        render([one], publishable=True, public_test_data=True) for one in (run, other)
    )
    assert public == others  # whatever the seed
    assert "Research only" in public


def test_names_from_outside_cannot_break_out(tmp_path: Path) -> None:
    nasty = read_run(write_run(tmp_path / "x", classes=(NASTY, "dog", "ship")))
    run = replace(nasty, name=NASTY, config={**nasty.config, "model": NASTY})
    text = render([run, read_run(write_run(tmp_path / "y", method="dp-sgd"))])
    page = Page(text)
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert NASTY in json.dumps(page.data, ensure_ascii=False).replace('\\"', '"')


def test_a_comparison_highlights_what_differs(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / m, method=m)) for m in ("dp-sgd", "bam")]
    text = render(runs)
    changed = text[text.index('id="configuration"') :].split('class="changed"')
    rows = [row.split("</tr>")[0] for row in changed[1:]]
    assert len(rows) == 2  # the method, and lambda, which DP-SGD does not have
    assert any("dp-sgd" in row for row in rows)


def test_empty_sections_say_why(tmp_path: Path) -> None:
    text = render([read_run(write_run(tmp_path / "a", measured=False, evaluated=False))])
    assert "The bias was not measured in this run." in text
    assert "dpbam evaluate RUN --save" in text


def test_a_long_measured_run_stays_small(tmp_path: Path) -> None:
    """75 epochs, every step measured, 100 classes: under 3 MB."""
    classes = tuple(f"class {k}" for k in range(100))
    folder = write_run(tmp_path / "long", epochs=75, batch_size=25, classes=classes)
    run = read_run(folder)
    assert len(run.bias) == 3000
    assert len(render([run]).encode()) < 3_000_000


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


@pytest.mark.parametrize("control", ["\x1b[2J", "\u202e", "\x9b2J"])
def test_the_page_has_no_control_characters(control: str, tmp_path: Path) -> None:
    """A browser or a terminal that shows the source would obey them; ticks and dashes stay."""
    page = _environment().from_string("{{ name }}").render(name=f"a{control}b \u2014 \u2713\n")
    assert page == f"a\ufffd{control[1:]}b \u2014 \u2713\n"
