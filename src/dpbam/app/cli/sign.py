"""``dpbam sign``: the operator vouches for a run's statement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpbam.app.cli.output import facts, option, say


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
