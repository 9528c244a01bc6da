"""The ledger: what was spent, append-only, on disk before a result can reach the parameters.

An entry is one released step, keyed by (noise stream, step):

================================  =============================================================
the same key again                result
================================  =============================================================
the same release (seeded replay)  not charged: nothing new is released
another release (seeded)          refused: the same noise on two sums would cancel
unseeded                          cannot happen: each process has a stream of its own, so a
                                  replay after a crash is a new entry, and is charged again
================================  =============================================================

So after a crash the count may include steps since the last checkpoint twice; it is never too low.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpbam import _jsonl, _validate
from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.privacy.accounting import ACCOUNTANTS, Charge, checked, total_epsilon

BEFORE = "/before"  # ends the stream of a release before the first step
_FIELDS = ("stream", "step", "noise_multiplier", "sampling_rate", "unit", "release")
_INVALID = (*_jsonl.INVALID, KeyError, TypeError, OverflowError)


class Ledger:
    """Records private releases, append-only, and computes their epsilon.

    Guarantee: a step is on disk before ``charge`` returns; its count is never too low, after any
    crash; the same noise is never charged for two different releases; all entries protect the same
    unit of privacy.

    Assumptions: the disk keeps what was synchronised, and the file is not edited or deleted
    (``dpbam audit`` compares it with the checkpoint, the budget with both).

    Proof: append and fsync come before the entry counts; the table above; crash tests in
    tests/end_to_end.

    Args:
        delta: the default of :meth:`epsilon`.
        accountant: ``"pld"`` or ``"rdp"``.
        path: a JSON-lines file to append to, created if missing; None keeps it in memory.

    Example:
        >>> ledger = Ledger(delta=1e-5)
        >>> for step in range(1000):
        ...     ledger.charge("stream", step, noise_multiplier=1.731, sampling_rate=4096 / 50_000)
        >>> round(ledger.epsilon(), 2)
        8.0
    """

    def __init__(self, delta: float, accountant: str = "pld", path: Path | None = None) -> None:
        self.delta = _validate.probability("delta", delta)
        self.accountant = _validate.one_of("accountant", accountant, ACCOUNTANTS)
        self.path = path
        self._releases: dict[tuple[str, int], dict[str, Any]] = {}
        self._counts: Counter[tuple[float, float]] = Counter()
        self._steps = 0
        self.unit: str | None = None  # of privacy; None before the first entry
        if path is not None and path.exists():
            entries = _read(path)
            self._check_unit(entries)
            for entry in entries:
                self._remember(entry)

    def charge(
        self,
        stream: str,
        step: int,
        *,
        noise_multiplier: float,
        sampling_rate: float,
        unit: str = "record",
        release: str | None = None,
    ) -> None:
        """Record one step. On return it is on disk.

        Args:
            stream: the name of the noise; unique to a process unless seeded.
            step: the step's number.
            noise_multiplier: sigma; 0 makes epsilon infinite.
            sampling_rate: q.
            unit: what the step protects; the same for all entries.
            release: a digest of what is released, for seeded runs, to recognise a replay.
        """
        entry = _checked({
            "stream": stream,
            "step": step,
            "noise_multiplier": noise_multiplier,
            "sampling_rate": sampling_rate,
            "unit": unit,
            "release": release,
        })  # fmt: skip
        self._check_unit([entry])
        key = (stream, step)
        if key in self._releases:
            if release is not None and release == self._releases[key]["release"]:
                return
            raise ArgumentError(
                f"the noise of step {step} (stream {stream}) was already used for another release: "
                "two sums with the same noise reveal their difference; use another seed, or none"
            )
        if self.path is not None:
            _jsonl.append_durably(self.path, entry)
        self._remember(entry)

    def entries(self) -> list[dict[str, Any]]:
        """Return everything recorded, as plain values that a checkpoint can hold."""
        return [dict(entry) for entry in self._releases.values()]

    def merge(self, entries: Iterable[dict[str, Any]]) -> None:
        """Record the entries of another ledger; those that are here already are not charged twice.

        On return they are on disk. So a run resumed from a checkpoint has the checkpoint's entries
        and those of its own file.

        Raises:
            ValueError: if an entry contradicts one that is here; then nothing has changed.
        """
        new: dict[tuple[str, int], dict[str, Any]] = {}
        given = list(map(_checked, entries))
        self._check_unit(given)
        for entry in given:
            key = (entry["stream"], entry["step"])
            known = self._releases.get(key) or new.setdefault(key, entry)
            if known != entry:
                raise ArgumentError(
                    f"step {key[1]} of {key[0]} is on the ledger with other values: these are two "
                    "runs, which need different names"
                )
        if self.path is not None and new:
            _jsonl.append_durably(self.path, *new.values())
        for entry in new.values():
            self._remember(entry)

    def charges(self) -> list[Charge]:
        """Return what was spent, equal steps counted together."""
        return [Charge(sigma, q, count) for (sigma, q), count in sorted(self._counts.items())]

    def epsilon(self, delta: float | None = None) -> float:
        """Return epsilon of everything recorded; infinite if any step had no noise."""
        delta = self.delta if delta is None else delta
        return total_epsilon(self.charges(), delta, accountant=self.accountant)

    def released_before(self) -> list[str]:
        """Return the streams of releases before the first step: they end in ``/before``."""
        return [stream for stream, _ in self._releases if stream.endswith(BEFORE)]

    def entry(self, stream: str, step: int) -> dict[str, Any] | None:
        """Return what was recorded of a step, or None."""
        found = self._releases.get((stream, step))
        return None if found is None else dict(found)

    def __len__(self) -> int:
        """Return the number of steps; releases before the first step are none."""
        return self._steps

    def _check_unit(self, entries: Iterable[dict[str, Any]]) -> None:
        units: set[str] = {entry["unit"] for entry in entries}
        if self.unit is not None:
            units.add(self.unit)
        if len(units) > 1:
            raise ArgumentError(
                f"a ledger counts what is spent per unit of privacy, and these steps protect a "
                f"{' and a '.join(sorted(units))}: use a ledger for each"
            )

    def _remember(self, entry: dict[str, Any]) -> None:
        self.unit = entry["unit"]
        self._releases[(entry["stream"], entry["step"])] = entry
        self._counts[(entry["noise_multiplier"], entry["sampling_rate"])] += 1
        self._steps += not entry["stream"].endswith(BEFORE)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return all entries; a torn last line is removed, since its step was never released."""
    entries = []
    for number, line in enumerate(_jsonl.repair(path, _is_entry), 1):
        try:
            entries.append(_parsed(line))
        except _INVALID as error:
            raise ArgumentError(
                f"{path} line {number} is not a ledger entry ({error}): restore the file from a "
                "backup; without it what was spent is not known"
            ) from None
    return entries


def _is_entry(line: bytes) -> bool:
    try:
        _parsed(line)
    except _INVALID:
        return False
    return True


def _parsed(line: bytes) -> dict[str, Any]:
    return _checked(json.loads(line))


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry if it can be accounted for; a file may have been edited."""
    if lacking := [name for name in _FIELDS if name not in entry]:
        raise ArgumentError(f"a ledger entry needs {lacking[0]}: another version wrote it")
    checked(Charge(entry["noise_multiplier"], entry["sampling_rate"], 1))
    _validate.count("step", entry["step"], least=0)
    named = isinstance(entry["stream"], str) and isinstance(entry["unit"], str)
    if not named or not isinstance(entry["release"], str | None):
        raise ArgumentTypeError("stream, unit and release must be text")
    return entry
