"""``dpbam audit`` of an exported model: are its files the ones that were exported, and signed?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dpbam.app.audit.evidence import Finding
from dpbam.app.audit.stated import signature, texts
from dpbam.app.runs.documents import Exported, Statement
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.identity import EXPORTED, exported_files, public_key
from dpbam.app.runs.run import RunError

MEANS = (
    "the folder's files are those that exported.json lists, no more and no less; the privacy "
    "statement among them is about the model that was exported, and lets it be published"
)
DOES_NOT_MEAN = (
    "that the statement is true (for that, audit the run's folder); that the exported file "
    "computes what the run's model does (dpbam export compares their predictions); or, "
    "without a signature and the operator's public key, that the list of files is the operator's"
)


def check_export(folder: str | Path, operator: Path | None = None) -> list[Finding]:
    """Every finding about the exported folder.

    Args:
        folder: what ``dpbam export`` wrote.
        operator: the operator's public key (PEM); ``exported.json`` must then be signed with it.

    Raises:
        RunError: if a file cannot be read.
    """
    export = RunFolder(folder)
    strangers = list(export.strangers())
    if strangers:
        return [Finding("no link leads out of the folder, all files are plain", False,
                        strangers[0])]  # fmt: skip
    if not export.statement_json.is_file():
        raise RunError(f"{export.statement_json} is missing: export the run anew")
    key = None if operator is None else public_key(operator)
    try:
        return [*_files(export), *_statement(export), *signature(export, key)]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        return [Finding("export", False, f"a field is missing or of the wrong kind: {error}")]


def _files(export: RunFolder) -> Iterator[Finding]:
    listed = Exported.read(export.path / EXPORTED).files
    there = exported_files(export)
    odd = sorted({*listed} ^ {*there})
    yield Finding("the folder holds the files that were exported, no others", not odd,
                  ", ".join(odd) or f"{len(there)} files")  # fmt: skip
    for name in sorted({*listed} & {*there}):
        same = there[name] == listed[name]
        yield Finding(f"{name} is the file that was exported", same, str(listed[name]))


def _statement(export: RunFolder) -> Iterator[Finding]:
    statement = Statement.read(export.statement_json)
    weights = export.weights.name
    source = Exported.read(export.path / EXPORTED).exported_from.get(weights, "")
    yield Finding("the statement is about the model that was exported",
                  statement.identity.files.get(weights) == source, source)  # fmt: skip
    allowed = statement.private and weights in statement.may_be_published
    yield Finding("the statement lets the model be published", allowed, weights)
    yield from texts(export, statement)
