"""Names of classes, columns, files and people stay text in all that is published or shown."""

import csv
import html.parser
import io
import json
import re
import sys
import types

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from app.runs.test_statement import made
from dpbam.app.cli import main
from dpbam.app.report import write_report
from dpbam.app.report.figure import Figure, Panel
from dpbam.app.runs import card, escaping, execute, statement_text
from dpbam.app.runs.card import exported_card, model_card
from dpbam.app.runs.documents import BudgetState, ModelFacts, OtherRun, Statement
from dpbam.app.runs.escaping import cell, json_text, visible
from dpbam.app.runs.export import export
from dpbam.app.runs.statement_text import to_html, to_markdown
from dpbam.training.events import EvaluationReport

HOSTILE = (
    "<script>alert(1)</script>", "<b>", "![x](http://evil.example/x.png)", "[x](javascript:x)",
    "<http://evil.example>", "https://evil.example", "www.evil.example", "a@evil.example",
    "\x1b[2J", "\x9b2J", "\x7f", "\r", "\n\n## Privacy\n\n**epsilon = 0.001**", "\n---\n",
    "\nlibrary_name: evil\n", " | ", "\\", "\\|", "`", "``", "*", "**", "_", "~~", "&lt;", "$x$",
    "=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\t=1", "\u202e", "\u2028", "\ud800", "#", "1.",
    "{unit}", "{}", "%s", "Ärzte", "ill", " ",
)  # fmt: skip
names = st.lists(st.sampled_from(HOSTILE) | st.characters(), min_size=1, max_size=4)
names = names.map(lambda parts: "".join(parts).strip()).filter(bool)
PLAIN = "Qname"  # stands for a name where its effect is measured
MODEL = ModelFacts(
    format=4, dpbam="0", model=PLAIN, model_options={}, image_shape=[1, 8, 8], task="single-label",
    class_names=[PLAIN, "well"], input="", method="bam",
)  # fmt: skip
METRICS = EvaluationReport(
    step=8, epoch=1.0, epsilon=3.0, scores={"accuracy": 0.5}, loss=1.0, records=9
)


def named(values, name):
    """Put the name wherever a statement or a model has the plain one."""
    return escaping.each_text(values, lambda text: text.replace(PLAIN, name))


@pytest.fixture(scope="module")
def stated():
    return stated_values()


def stated_values():
    """Return a statement with the plain name in every field that a user can fill."""
    from dpbam.app.runs import RunConfig

    config = RunConfig(
        model="mlp", noise_multiplier=4.0, accountant="rdp", delta=1e-4, batch_size=180, epochs=1,
        operator=PLAIN, curator=PLAIN, purpose=PLAIN, unit_reason=PLAIN,
        class_weights={"3": 2.0},
    )  # fmt: skip
    budget = BudgetState(
        file=PLAIN, epsilon=3.0, delta=1e-4, taken=1.0,
        other_runs=[OtherRun(run=PLAIN, finished=True)],
    )  # fmt: skip
    values = made(config, budget=budget).to_json()
    return Statement.model_validate(values | {
        "unit_name": PLAIN, "unit": f"{PLAIN} (all records)", "method": PLAIN, "filter": PLAIN,
        "clipping": PLAIN, "own_code": PLAIN, "initial_weights": f"from {PLAIN}, public",
        "class_weights": f"{PLAIN} 2", "accountant": PLAIN, "tuned_on": PLAIN,
        "evaluated_on": {**values["evaluated_on"], "set": PLAIN, "public": True},
        "public_weights": {"source": f"hf:{PLAIN}/{PLAIN}", "files": {}},
        "outside_the_promise": [line.replace("record", PLAIN)
                                for line in values["outside_the_promise"]],
    })  # fmt: skip


def structure(markdown):
    """Return the kinds of everything that a Markdown reader finds, and all of the text."""
    kinds, text = [], []
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        kinds.append(token.type)
        for inner in token.children or ():
            if inner.type in ("text", "text_special", "code_inline"):
                text.append(inner.content)
            kinds += [] if inner.type in ("text", "text_special") else [inner.type]
    return kinds, "".join(text)


def page_structure(page):
    """Return the tags of a page, and its text."""
    tags, text = [], []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, attributes))
    parser.handle_endtag = tags.append
    parser.handle_data = text.append
    parser.feed(page)
    parser.close()
    return tags, "".join(text)


def check_name(stated, name):
    """The name changes the text of card and statement by itself, and nothing else about them."""
    shown = visible(name)
    documents = [
        [to_markdown(named(stated, word)) for word in (PLAIN, name)],
        [_body(model_card(named(stated, word), named(MODEL, word), METRICS))
         for word in (PLAIN, name)],
    ]  # fmt: skip
    for plain, hostile in documents:
        kinds, text = structure(plain)
        assert structure(hostile) == (kinds, text.replace(PLAIN, shown))
        assert all(c.isprintable() or c == "\n" for c in hostile)
    tags, text = page_structure(to_html(documents[0][0]))
    assert page_structure(to_html(documents[0][1])) == (tags, text.replace(PLAIN, shown))
    matters = [_matter(model_card(named(stated, word), named(MODEL, word), METRICS))
               for word in (PLAIN, name)]  # fmt: skip
    hub = escaping.each_text(matters[0], lambda text: text.replace(PLAIN, shown))
    hub["base_model"] = visible(f"{name}/{name}".partition("@")[0])
    assert matters[1] == hub


def _body(card):
    return card.split("\n---\n", 1)[1]


def _matter(card):
    return yaml.safe_load(card.split("\n---\n", 1)[0].removeprefix("---\n"))


@settings(max_examples=25)
@given(name=names)
def test_a_name_is_text_in_card_and_statement(stated, name):
    check_name(stated, name)


@pytest.mark.slow
@settings(max_examples=400)
@given(name=names)
def test_many_names_are_text_in_card_and_statement(stated, name):
    check_name(stated, name)


@pytest.mark.parametrize("name", HOSTILE[:2] + HOSTILE[8:9] + HOSTILE[12:13])
def test_a_name_that_is_not_escaped_is_noticed(stated, name, monkeypatch):
    for module in (card, statement_text):
        monkeypatch.setattr(module, "markdown", str)
    with pytest.raises(AssertionError):
        check_name(stated, name)


@given(name=names)
def test_a_cell_is_no_formula_and_json_is_visible(name):
    assert not cell(name).startswith(("=", "+", "-", "@", "\t", "\r"))
    assert all(c.isprintable() for c in cell(name))
    text = json_text({name: [name]}, indent=2)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert json.loads(text) == {name: [name]}


def test_a_series_of_a_figure_is_no_formula():
    rows = [{"series": name, "x": -1.0} for name in HOSTILE]
    table = Figure("f", "", "", "test", [Panel("", ("series", "x"), rows, {})]).to_csv()
    for series, x in list(csv.reader(table.splitlines()[2:], strict=True)):
        assert not series.startswith(("=", "+", "-", "@"))
        assert series.isprintable()
        assert x == "-1.0"


def test_the_card_of_an_export_differs_in_its_loading_alone(stated):
    name = 'library_name: "dpbam"'
    text = exported_card(model_card(named(stated, name), named(MODEL, name), None), "onnx")
    assert _matter(text)["library_name"] == "onnx"
    assert _matter(text)["tags"][1] == name
    assert "import onnxruntime" in text
    assert "load_run_model" not in text


CLASSES = ("=cmd' /C calc'!A0", "<script>alert(1)</script>", "\x1b[2J\x1b]0;owned\x07", "a\x9b2J",
           "x\n\n## Privacy\n\n**epsilon = 0.001**", "![x](http://evil.example/x.png)")  # fmt: skip
UNIT = "<blink>patient</blink>\n\n# \x1b[2J"


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """A finished run on data whose classes, column and module are named to harm."""
    from dpbam.app.runs import RunConfig

    def load(split):
        rng = np.random.default_rng(len(split))
        labels = np.array(CLASSES)[np.arange(60) % len(CLASSES)]
        owners = np.array([f"{split}-{k}" for k in range(60)])
        return rng.integers(0, 255, (60, 1, 8, 8), dtype=np.uint8), labels, {UNIT: owners}

    module = types.ModuleType("hostile_names")
    module.load = load
    sys.modules["hostile_names"] = module
    config = RunConfig(
        data="hostile_names:load", unit=UNIT, model="mlp", model_options={"hidden": [4]},
        noise_multiplier=3.0, accountant="rdp", delta=1e-4, batch_size=30, epochs=1, num_workers=0,
        purpose="[click](javascript:alert(1))", engine="functional",
    )  # fmt: skip
    yield execute(config, tmp_path_factory.mktemp("hostile") / "run").out
    del sys.modules["hostile_names"]


def test_no_published_file_of_a_run_obeys_a_name(hostile_run, tmp_path):
    exported, _ = export(hostile_run, "safetensors", tmp_path / "export")
    report = write_report([hostile_run], tmp_path / "report.html")
    published = [*hostile_run.glob("*.*"), *exported.glob("*.*")]
    for path in [p for p in published if p.suffix in (".md", ".json", ".html")]:
        text = path.read_text()
        assert all(c.isprintable() or c == "\n" for c in text), path
    for path in (p for p in published if p.suffix == ".md"):
        kinds, _ = structure(_body(path.read_text()) if path.name == "README.md" else
                             path.read_text())  # fmt: skip
        assert not {"html_block", "html_inline", "link_open", "image"} & {*kinds}, path
        assert path.read_text().count("\n## Privacy\n") == (path.name == "README.md")
    for path in [report, *(p for p in published if p.suffix == ".html")]:
        tags, _ = page_structure(path.read_text())
        assert sum(tag[0] == "script" for tag in tags) == (2 if path == report else 0), path
        assert ("blink", []) not in tags, path


def test_no_command_lets_a_name_control_the_terminal(hostile_run, tmp_path, capfd):
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 8, 8), np.uint8))
    folder = tmp_path / "\x1b[2J"
    folder.mkdir()
    (folder / "\x1b]0;owned\x07.png").write_bytes(b"no image")
    for command in (
        ["predict", str(hostile_run), str(tmp_path / "x.npz")],
        ["predict", str(hostile_run), str(tmp_path / "x.npz"), "--format", "json"],
        ["predict", str(hostile_run), str(folder)],
        ["evaluate", str(hostile_run), "--data", "hostile_names:load", "--by", "class"],
        ["evaluate", str(hostile_run), "--data", "hostile_names:load"],
        ["evaluate", str(hostile_run), "--data", "hostile_names:load", "--json"],
        ["report", str(hostile_run), "--out", str(folder / "page.html")],
    ):
        main(command)
        out, err = capfd.readouterr()
        assert out or err
        assert all(c.isprintable() or c == "\n" for c in out + err), command
        if command[-1].endswith(".npz"):
            rows = list(csv.reader(io.StringIO(out)))
            assert not any(re.match(r"[=+@\t\r]", text) for row in rows for text in row)
