"""``dpbam export``: a run's model for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dpbam.app.cli.evaluate import OwnModel, Run
from dpbam.app.cli.output import Json, option, print_facts
from dpbam.app.runs.export import TOLERANCE
from dpbam.app.runs.export import export as write


def export(
    run: Run,
    to: Annotated[str, option("onnx, hf or safetensors.")],
    out: Annotated[Path | None, option("A new folder. By default RUN-onnx, and so on.")] = None,
    model: OwnModel = None,
    json: Json = False,
) -> None:
    """Write a run's model as ONNX, for Hugging Face, or as safetensors, and check it.

    The written model is loaded again and must predict the same, to 1e-5. The folder also gets the
    model card and the privacy statement; everything in it may be published. What the statement
    does not let be published, or is not about, is refused.

    Examples:
        $ dpbam export runs/scans --to onnx
        $ dpbam export runs/scans --to hf --out scans-for-the-hub
    """
    folder, difference = write(run, to, out, own_model=model)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    allowed = f"differ by at most {difference:.1e} of the largest ({TOLERANCE:g} is allowed)"
    checked = f"loaded again, its outputs {allowed if difference else 'are the same'}"
    values = {"folder": str(folder), "files": ", ".join(files), "checked": checked}
    print_facts(values, json=json)
