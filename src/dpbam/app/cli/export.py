"""``dpbam export`` and ``dpbam sign``: a run's model for use elsewhere, and who vouches for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpbam.app.cli.evaluate import OwnModel, Run
from dpbam.app.cli.output import Json, facts, option, print_facts, say
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


def sign(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="A finished run, or an exported model.")
    ],
    key: Annotated[Path, option("The operator's private Ed25519 key, a PEM file.")],
) -> None:
    r"""Sign a run's privacy statement, which names the model's digest, with the operator's key.

    Everything that dpbam audit RUN checks is checked first; if anything is wrong, nothing is signed
    (exit code 2).

    The signature is written to privacy-statement.sig, which may be published. For the folder of an
    exported model it is exported.sig, and covers all files. dpbam audit RUN verifies it. It needs
    the extra sign: pip install 'dpbam\[sign]'.

    Examples:
        $ openssl genpkey -algorithm ed25519 -out operator.pem
        $ openssl pkey -in operator.pem -pubout -out operator-public.pem
        $ dpbam sign runs/digits --key operator.pem
        $ dpbam audit runs/digits --public-key operator-public.pem
    """
    from dpbam.app.audit.check import sign
    from dpbam.app.runs.folder import RunFolder
    from dpbam.app.runs.identity import signed_files

    run = RunFolder(folder)
    public = sign(folder, key)
    say(facts({"signature": signed_files(run)[1], "public key": public}))
