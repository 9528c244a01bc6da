"""Train on digits, and write the run's privacy statement to examples/privacy-statement.md.

    python tools/example_statement.py

The noise is not seeded, as in a run to be published: other digests and another accuracy come out
each time, the same promise.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from dpbam.app.cli import main

PAGE = Path(__file__).resolve().parent.parent / "examples" / "privacy-statement.md"
COMMAND = [
    "train", "--data", "digits", "--model", "small-cnn", "--epsilon", "3", "--epochs", "30",
    "--lr", "0.01",
    "--operator", "Example Laboratory", "--curator", "Example Hospital",
    "--purpose", "an example for the documentation",
    "--unit-reason", "each image was written by hand for this data set; writers are not recorded",
]  # fmt: skip
_HEAD = """# An example of a statement

Written by `python tools/example_statement.py`, which trains on scikit-learn's handwritten digits.
The questions that it answers are on [another page](../docs/statement.md).
A real statement starts below; names and purpose are invented.

"""


def page(statement: str) -> str:
    """The page: the statement below a heading, its own headings one level lower."""
    return _HEAD + re.sub(r"^#", "##", statement, flags=re.MULTILINE)


def write() -> None:
    """Train, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if main([*COMMAND, "--out", str(run)]):
            raise SystemExit("the training failed")
        PAGE.write_text(page((run / "privacy-statement.md").read_text()))


if __name__ == "__main__":
    write()
