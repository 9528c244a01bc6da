"""Planting a mistake: the same check passes on the real code and fails with one function wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Mistake:
    """One way that private training has been wrong.

    Attributes:
        check: raises AssertionError if the guarantee does not hold.
        owner: the module or class of the function that is made wrong.
        name: that function. If it has gone, planting fails, and so does the test.
        wrong: makes the mistaken function out of the right one.
    """

    check: Callable[[], None]
    owner: Any
    name: str
    wrong: Callable[[Any], Any]

    def catch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The check passes; with the mistake in place, and used, it fails."""
        self.check()
        used: list[str] = []
        wrong = self.wrong(getattr(self.owner, self.name))
        with monkeypatch.context() as patch:
            patch.setattr(self.owner, self.name, _noticed(wrong, used))
            with pytest.raises(AssertionError):
                self.check()
        assert used, f"{self.name} was never called: the check does not look at it"


def _noticed(wrong: Any, used: list[str]) -> Any:
    if isinstance(wrong, property):
        return property(_noticed(wrong.fget, used), wrong.fset)
    if isinstance(wrong, staticmethod | classmethod):
        return type(wrong)(_noticed(wrong.__func__, used))

    @functools.wraps(wrong)
    def call(*args: Any, **kwargs: Any) -> Any:
        used.append("used")
        return wrong(*args, **kwargs)

    return call


def repeats(mistakes: dict[str, Mistake]) -> list[str]:
    """Return the names of the mistakes whose check catches another one before them."""
    first: dict[Callable[[], None], str] = {}
    return [name for name, each in mistakes.items() if first.setdefault(each.check, name) != name]


def catches(mistakes: dict[str, Mistake], *, slow: Collection[str] = ()) -> Callable[[Any], Any]:
    """Parametrises a test over ``mistakes``; those named ``slow`` are left to `make test-all`."""
    cells = [
        pytest.param(mistake, id=name, marks=pytest.mark.slow if name in slow else ())
        for name, mistake in mistakes.items()
    ]
    return pytest.mark.parametrize("mistake", cells)
