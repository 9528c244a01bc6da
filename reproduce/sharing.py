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
from typing import TYPE_CHECKING, Any

from dpbam.app.compare.database import first_line, sqlalchemy, unusable
from dpbam.app.runs.result import RunError

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
        >>> shared.finished()
        {'pocket/methods/bam-seed-0'}
    """

    def __init__(
        self, url: str, *, heartbeat: float = HEARTBEAT, patience: float = PATIENCE
    ) -> None:
        sql = sqlalchemy()
        self._me = f"{platform.node()}-{secrets.token_hex(6)}"
        self._heartbeat, self._patience = heartbeat, patience
        self._seen: dict[str, tuple[str, int, float]] = {}  # run: (worker, heartbeats, since when)
        self.runs = sql.Table(
            "dpbam_runs",
            sql.MetaData(),
            sql.Column("run", sql.String(255), primary_key=True),
            sql.Column("worker", sql.String(128), nullable=False),
            sql.Column("heartbeats", sql.Integer, nullable=False),
            sql.Column("record", _long_text()),  # NULL while the run is under way
        )
        try:
            self._engine = sql.create_engine(url, pool_pre_ping=True)
            self._create()
        except Exception as error:  # whatever a database driver raises
            raise unusable(url, error) from error

    def _create(self) -> None:
        """Make the table, unless it is there; another machine may be making it, too."""
        sql = sqlalchemy()
        try:
            self.runs.metadata.create_all(self._engine)
        except sql.exc.SQLAlchemyError:
            if not sql.inspect(self._engine).has_table(self.runs.name):
                raise

    def finished(self) -> set[str]:
        """The names of all finished runs."""
        runs = self.runs.c
        with self._transaction() as connection:
            wanted = self.runs.select().with_only_columns(runs.run).where(runs.record.is_not(None))
            return set(connection.execute(wanted).scalars())

    def record(self, run: str) -> str | None:
        """A run's record, if it is finished."""
        row = self._row(run)
        return None if row is None else row.record

    def _row(self, run: str) -> Any:
        with self._transaction() as connection:
            return connection.execute(self.runs.select().where(self.runs.c.run == run)).first()

    def claim(self, run: str) -> bool:
        """Take a run that nobody does, or whose machine is gone; False: it is in good hands."""
        return self._insert(run, None) or self._take_over(run)

    def _insert(self, run: str, record: str | None) -> bool:
        """A row of one's own; False if there is one."""
        values = {"run": run, "worker": self._me, "heartbeats": 0, "record": record}
        try:
            with self._transaction() as connection:
                connection.execute(self.runs.insert().values(**values))
        except sqlalchemy().exc.IntegrityError:
            return False
        return True

    def _take_over(self, run: str) -> bool:
        row = self._row(run)
        if row is None or row.record is not None:
            return False
        *before, since = self._seen.get(run, ("", -1, 0.0))
        if before != [row.worker, row.heartbeats]:
            self._seen[run] = row.worker, row.heartbeats, time.monotonic()
            return False
        if time.monotonic() - since < self._patience:
            return False
        # of several that find it abandoned, what one has seen is there for the first of them only
        runs = self.runs.c
        same = (runs.worker == row.worker) & (runs.heartbeats == row.heartbeats)
        taken = self.runs.update().where((runs.run == run) & same & runs.record.is_(None))
        with self._transaction() as connection:
            found = connection.execute(taken.values(worker=self._me, heartbeats=0))
        return bool(found.rowcount == 1)

    def finish(self, run: str, record: str) -> str:
        """Leave a run's record; what counts is the first, which is returned."""
        runs = self.runs.c
        left = self.runs.update().where((runs.run == run) & runs.record.is_(None))
        while True:
            with self._transaction() as connection:
                if connection.execute(left.values(record=record)).rowcount == 1:
                    return record
            first = self.record(run)
            if first is not None:
                return first
            if self._insert(run, record):
                return record  # nobody had claimed it

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
        errors = sqlalchemy().exc
        try:
            with self._engine.begin() as connection:
                yield connection
        except errors.IntegrityError:
            raise
        except errors.SQLAlchemyError as error:
            raise RunError(
                f"the storage no longer answers ({first_line(error)}): finished runs are kept, "
                "and the same command goes on"
            ) from error

    def _mine(self) -> ColumnElement[bool]:
        runs = self.runs.c
        mine: ColumnElement[bool] = (runs.worker == self._me) & runs.record.is_(None)
        return mine


def _long_text() -> Any:
    """Text of any length: MySQL's own ends at 64 kB."""
    from sqlalchemy.dialects.mysql import LONGTEXT

    return sqlalchemy().Text().with_variant(LONGTEXT(), "mysql", "mariadb")
