"""Write what the documentation shows of statements and reports: an example, its pictures, a schema.

    python tools/statements.py           # the schema, from the statement's type
    python tools/statements.py --train   # also the example and the pictures, of a run on digits

The noise is not seeded, as in a run to be published: other digests and another accuracy come out
each time, the same promise. Pictures need Chromium, which opens files of this machine only.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dpbam.app.cli import main
from dpbam.app.runs.documents import Statement
from dpbam.app.runs.files import FORMAT

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
PAGE = ROOT / "examples" / "privacy-statement.md"
SCHEMA = ASSETS / "privacy-statement.schema.json"
COMMAND = [
    "train", "--data", "digits", "--model", "small-cnn", "--epsilon", "3", "--epochs", "30",
    "--lr", "0.01",
    "--operator", "Example Laboratory", "--curator", "Example Hospital",
    "--purpose", "an example for the documentation",
    "--unit-reason", "each image was written by hand for this data set; writers are not recorded",
]  # fmt: skip
_HEAD = """# An example of a statement

Written by `python tools/statements.py --train`, which trains on scikit-learn's handwritten digits.
The questions that it answers are on [another page](../docs/statement.md).
A real statement starts below; names and purpose are invented.

"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = (1000, 960)
COLOURS = 48  # of text and lines; more only make the file larger


def schema() -> str:
    """Return the JSON schema of the privacy statement as text."""
    values = Statement.model_json_schema(mode="validation")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"dpbam privacy statement, format {FORMAT}",
        "description": 'privacy-statement.json of a run folder. Infinity is the word "infinite".',
    }
    rest = {key: value for key, value in values.items() if key not in ("title", "description")}
    return json.dumps({**head, **rest}, indent=1, ensure_ascii=False) + "\n"


def page(statement: str) -> str:
    """Return the page: the statement below a heading, its own headings one level lower."""
    return _HEAD + re.sub(r"^#", "##", statement, flags=re.MULTILINE)


def photograph(page: Path, picture: Path, size: tuple[int, int] = SIZE) -> None:
    """Write the top of a page as a picture of few colours."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"pictures need one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}",
                f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=20000",
                f"--screenshot={picture}", page.resolve().as_uri(),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
    with Image.open(picture) as taken:
        taken.convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def train() -> None:
    """Train, and write the example and the pictures of its statement and report."""
    with tempfile.TemporaryDirectory() as folder:
        run, report = Path(folder) / "digits", Path(folder) / "report.html"
        if main([*COMMAND, "--out", str(run)]) or main(["report", str(run), "--out", str(report)]):
            raise SystemExit("the training or its report failed")
        PAGE.write_text(page((run / "privacy-statement.md").read_text()))
        photograph(run / "privacy-statement.html", ASSETS / "statement.png")
        photograph(report, ASSETS / "report.png")


if __name__ == "__main__":
    SCHEMA.write_text(schema(), encoding="utf-8")
    if "--train" in sys.argv[1:]:
        train()
