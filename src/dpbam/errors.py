"""Errors that a user can fix derive from :class:`DPBAMError`.

The message is one sentence: cause, value, way out. The command line shows it and exits with 2, as
for wrong flags, system errors (``OSError``) and lack of memory; any other exception is a bug in
dpbam, and is shown with its traceback. Subclasses are also a ``ValueError`` or a ``TypeError``.
"""

from __future__ import annotations


class DPBAMError(Exception):
    """An error that a user can fix."""


class ArgumentError(DPBAMError, ValueError):
    """A value that cannot be used."""


class ArgumentTypeError(DPBAMError, TypeError):
    """A value of a type that cannot be used."""


class PlanViolationError(DPBAMError, ValueError):
    """The plan does not account for what the oracle was given; nothing was charged."""
