"""What a user can mend: every such error derives from :class:`DPBAMError`.

The message is one sentence: what was wrong, where, and what to do. The command line shows it and
exits with 2, as it does for wrong flags, for errors of the system (``OSError``) and for a lack of
memory; anything else is a mistake in dpbam, and is shown with its traceback. A subclass is a
``ValueError`` or a ``TypeError`` too, as elsewhere in Python.
"""

from __future__ import annotations


class DPBAMError(Exception):
    """What a user can mend."""


class ArgumentError(DPBAMError, ValueError):
    """A value that cannot be used.

    Example:
        >>> from dpbam import DPSAT
        >>> try:
        ...     DPSAT(lam=-1.0)
        ... except ArgumentError as error:
        ...     print(error)
        lam must be zero or positive and finite, got -1.0
    """


class ArgumentTypeError(DPBAMError, TypeError):
    """A value of a type that cannot be used."""
