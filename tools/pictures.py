"""Train on digits, and photograph the statement and the report: docs/assets/{statement,report}.png.

    python tools/pictures.py

The noise is not seeded, as in a run to be published: another accuracy comes out each time. Needs
Chromium, which opens files of this machine only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from dpbam.app.cli import main

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMMAND = [
    "train", "--data", "digits", "--model", "small-cnn", "--epsilon", "3", "--epochs", "30",
    "--lr", "0.01",
    "--operator", "Example Laboratory", "--curator", "Example Hospital",
    "--purpose", "an example for the documentation", "--quiet",
]  # fmt: skip
SIZE = (1000, 960)
COLOURS = 48  # of text and lines; more only make the file larger


def photograph(page: Path, picture: Path) -> None:
    """Write the top of a page as a picture of few colours."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"pictures need one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}",
                f"--window-size={SIZE[0]},{SIZE[1]}", "--virtual-time-budget=20000",
                f"--screenshot={picture}", page.resolve().as_uri(),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
    with Image.open(picture) as taken:
        taken.convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def write(assets: Path = ASSETS) -> None:
    """Train, and write both pictures."""
    with tempfile.TemporaryDirectory() as folder:
        run, report = Path(folder) / "digits", Path(folder) / "report.html"
        if main([*COMMAND, "--out", str(run)]) or main(["report", str(run), "--out", str(report)]):
            raise SystemExit("the training or its report failed")
        photograph(run / "privacy-statement.html", assets / "statement.png")
        photograph(report, assets / "report.png")


if __name__ == "__main__":
    sys.exit(write())
