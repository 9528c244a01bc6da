"""The page of guarantees: of every function of the mechanism, from its docstring.

A docstring has paragraphs that begin with ``Guarantee:``, ``Assumptions:`` and ``Proof:``. A public
function or class of these modules that lacks one fails a test, unless it is listed as a helper.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = ("Guarantee", "Assumptions", "Proof")
#: The modules of the mechanism, in the order of a step.
MODULES = {
    "The mechanism": ("dpbam.mechanism", "dpbam.scratch", "dpbam.reference"),
    "The oracle": ("dpbam.oracle", "dpbam.guard", "dpbam.assembly"),
    "The plan": ("dpbam.privacy.plan",),
    "Sampling": ("dpbam.privacy.sampling",),
    "Clipping": ("dpbam.privacy.clipping", "dpbam.contenders.clippings"),
    "Noise": ("dpbam.privacy.noise", "dpbam.privacy.secure_noise", "dpbam.privacy.randomness"),
    "Code of the user's": ("dpbam.own_code",),
    "Joint release of statistics": ("dpbam.joint_release", "dpbam.bias.release"),
    "Ledger": ("dpbam.privacy.ledger", "dpbam.privacy.writer_lock"),
    "Accounting": (
        "dpbam.privacy.accounting", "dpbam.privacy.calibration", "dpbam.privacy.tradeoff",
    ),
    "The budget of a data set": ("dpbam.app.runs.budget", "dpbam.app.runs.spending"),
    "Searches": ("dpbam.app.search.selection",),
}  # fmt: skip
#: Values, errors, and functions whose result no guarantee depends on.
HELPERS = {
    "read_together", "digits_of", "refuse", "other_batches",
    "two_sided_tail", "probability", "check_unchanged", "check_same_watchers", "check_oracle",
    "Admitted", "Attempt", "Step", "Terms", "Released", "keeps_nothing", "attributes_of", "differs",
    "Contributions", "JointRelease", "check_counted", "gather", "charge", "identify", "describe",
    "replace_quietly", "Query", "epoch_steps", "default_delta", "unclipped",
    "check_norm", "widest_dtype", "make_clipping", "make_noise", "ReleasedStatistics", "Charge",
    "checked",
    "accountant_version", "quiet", "GaussianBound", "Entry", "preview", "note",
    "release_reservation", "stored_ledger", "check_steps", "WriterLock", "BudgetFile",
    "BudgetPreview", "is_lost", "explain_loss",
    "has_own_code", "call_hook", "is_built_in_function", "check_instance",
}  # fmt: skip
_HEAD = """# Guarantees

What each part of the mechanism guarantees, what it assumes, and why: from the docstrings, which
stand next to the code. [Privacy](privacy.md) puts them together to one proof;
[the tests of each promise](#promises-and-their-tests) are at the end.
"""
_PROMISES = """## Promises and their tests

Each promise has its test, and mistakes that are planted in the running code on which the test must
fail. `python tests/claims/promises.py` prints this table.
"""


def page() -> str:
    """Return the page: a section per part of the mechanism."""
    parts = [_HEAD]
    for title, modules in MODULES.items():
        parts.append(f"## {title}\n")
        parts += [_entry(name, made) for module in modules for name, made in members(module)]
    return "\n".join([*parts, _PROMISES, _promises()])


def _promises() -> str:
    """Return the table that the tests build; its links are those of a page in docs/."""
    with _importable(Path(__file__).resolve().parents[2] / "tests" / "claims"):
        return str(import_module("promises").table())


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def members(module: str) -> list[tuple[str, Any]]:
    """The public functions and classes that a module of the mechanism defines, but for helpers."""
    found = vars(import_module(module)).items()
    return [
        (name, made)
        for name, made in found
        if not name.startswith("_") and name not in HELPERS
        and (inspect.isfunction(made) or inspect.isclass(made)) and made.__module__ == module
    ]  # fmt: skip


def stated(made: Any) -> dict[str, str]:
    """The labelled paragraphs of a docstring.

    Example:
        >>> def f():
        ...     '''Do it.
        ...
        ...     Guarantee: it is
        ...     done.
        ...     '''
        >>> stated(f)
        {'Guarantee': 'it is done.'}
    """
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(made) or "")
    labelled = (paragraph.partition(": ") for paragraph in paragraphs)
    return {label: " ".join(text.split()) for label, _, text in labelled if label in PARTS}


def _entry(name: str, made: Any) -> str:
    path = "src/" + made.__module__.replace(".", "/") + ".py"
    lines = [f"- **{label}.** {_code(text)}" for label, text in stated(made).items()]
    return "\n".join([f"### [`{name}`](../{path}#{name})\n", *lines, ""])


def _code(text: str) -> str:
    """A docstring's names in code style; what Markdown would read as its own is escaped."""
    parts = text.split("``")
    return "".join(
        f"`{part}`" if k % 2 else part.replace("*", "\\*").replace("<", "&lt;")
        for k, part in enumerate(parts)
    )
