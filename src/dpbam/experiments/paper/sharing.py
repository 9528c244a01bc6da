"""Runs that several machines do together: one table of a database says who does which.

A machine claims a run before it begins, says now and then that it is alive, and leaves the run's
record in the table when it is done; the others copy it. No clock is compared: a claim whose
count of heartbeats has stood still for a while, as seen from here, is of a machine that is gone,
and its run may be taken over.
"""

from __future__ import annotations

import platform
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING

from dpbam.runs.config import ConfigError
from dpbam.runs.result import RunError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

HEARTBEAT = 10.0  # seconds
PATIENCE = 90.0  # seconds without a heartbeat after which a machine is taken for gone


class SharedRuns:
    """The table ``dpbam_runs``: one row a run that was begun.

    Args:
        url: of the database, as SQLAlchemy writes it.
        heartbeat: seconds between two signs of life.
        patience: seconds without one after which a claim may be taken over.

    Example:
        >>> shared = SharedRuns("sqlite://")
        >>> shared.claim("pocket/methods/bam-seed-0"), shared.claim("pocket/methods/bam-seed-0")
        (True, False)
        >>> shared.finish("pocket/methods/bam-seed-0", "{}")
        '{}'
        >>> shared.records()
        {'pocket/methods/bam-seed-0': '{}'}
    """

    def __init__(
        self, url: str, *, heartbeat: float = HEARTBEAT, patience: float = PATIENCE
    ) -> None:
        sql = _sqlalchemy()
        self._me = f"{platform.node()}-{secrets.token_hex(6)}"
        self._heartbeat, self._patience = heartbeat, patience
        self._seen: dict[str, tuple[int, float]] = {}  # run: (its heartbeats, since when)
        self.runs = sql.Table(
            "dpbam_runs",
            sql.MetaData(),
            sql.Column("run", sql.String(255), primary_key=True),
            sql.Column("worker", sql.String(128), nullable=False),
            sql.Column("heartbeats", sql.Integer, nullable=False),
            sql.Column("record", sql.Text(2**24)),  # NULL while the run is under way
        )
        try:
            self._engine = sql.create_engine(url, pool_pre_ping=True)
            self.runs.metadata.create_all(self._engine)
        except Exception as error:  # whatever a database driver raises
            raise ConfigError(f"the storage {url} cannot be used: {_first_line(error)}") from error

    def records(self) -> dict[str, str]:
        """The records of all finished runs, by the run's name."""
        runs = self.runs.c
        with self._transaction() as connection:
            rows = connection.execute(self.runs.select().where(runs.record.is_not(None)))
            return {row.run: row.record for row in rows}

    def claim(self, run: str) -> bool:
        """Take a run that nobody does, or whose machine is gone; False: it is in good hands."""
        try:
            with self._transaction() as connection:
                values = {"run": run, "worker": self._me, "heartbeats": 0}
                connection.execute(self.runs.insert().values(**values))
            return True
        except _sqlalchemy().exc.IntegrityError:  # there is such a row
            return self._take_over(run)

    def _take_over(self, run: str) -> bool:
        runs = self.runs.c
        with self._transaction() as connection:
            row = connection.execute(self.runs.select().where(runs.run == run)).one_or_none()
            if row is None or row.record is not None:
                return False
            count, since = self._seen.get(run, (-1, 0.0))
            if count != row.heartbeats:
                self._seen[run] = row.heartbeats, time.monotonic()
                return False
            if time.monotonic() - since < self._patience:
                return False
            # of several that find it abandoned, the heartbeats that one saw are there for one only
            same = (runs.run == run) & (runs.heartbeats == count) & runs.record.is_(None)
            taken = self.runs.update().where(same)
            done = connection.execute(taken.values(worker=self._me, heartbeats=count + 1))
            return bool(done.rowcount == 1)

    def finish(self, run: str, record: str) -> str:
        """Leave a run's record; what counts is the first, which is returned."""
        runs = self.runs.c
        with self._transaction() as connection:
            still = (runs.run == run) & runs.record.is_(None)
            left = connection.execute(self.runs.update().where(still).values(record=record))
            if left.rowcount == 1:
                return record
            row = connection.execute(self.runs.select().where(runs.run == run)).one_or_none()
            if row is not None:
                return str(row.record)
            values = {"run": run, "worker": self._me, "heartbeats": 0, "record": record}
            connection.execute(self.runs.insert().values(**values))
            return record

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Heartbeats while inside; afterwards, claims that came to nothing are given back."""
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            with suppress(RunError), self._transaction() as connection:
                connection.execute(self.runs.delete().where(self._mine()))

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(self._heartbeat):
            again = self.runs.update().where(self._mine())
            # a database may be away for a moment: the next one may get through
            with suppress(RunError), self._transaction() as connection:
                connection.execute(again.values(heartbeats=self.runs.c.heartbeats + 1))

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """All or nothing; a failure of the database is said in a sentence."""
        errors = _sqlalchemy().exc
        try:
            with self._engine.begin() as connection:
                yield connection
        except errors.IntegrityError:
            raise
        except errors.SQLAlchemyError as error:
            raise RunError(
                f"the storage no longer answers ({_first_line(error)}): finished runs are kept, "
                "and the same command goes on"
            ) from error

    def _mine(self) -> ColumnElement[bool]:
        runs = self.runs.c
        mine: ColumnElement[bool] = (runs.worker == self._me) & runs.record.is_(None)
        return mine


def _sqlalchemy() -> ModuleType:
    try:
        import sqlalchemy
    except ImportError:
        raise ConfigError(
            "--storage needs SQLAlchemy, which comes with Optuna: pip install 'dpbam[search]'"
        ) from None
    return sqlalchemy


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error) else type(error).__name__
