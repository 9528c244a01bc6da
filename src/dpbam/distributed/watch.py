"""Who is missing: a pulse a rank in the launcher's store, read when a message has failed.

A failed message says "connection closed", or nothing until the time-out, and never which rank was
the first to go: the others fail one after another. So every rank counts up a number of its own
about once a second. After a failure, whose number stands still is gone. The first rank to find out
writes it down, and is the one to speak; the others then end without a word.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

BEAT = 1.0  # seconds
_LOOK = 3  # beats between two looks at the pulses
_PATIENCE = 10  # beats to wait for the store
_ENDED = "ended"
_RESUME = "what was released is on the ledger; go on with --resume"


class Watch:
    """A rank's own pulse, and a look at the others'.

    Args:
        stores: two connections to the store that the ranks share, one a thread; with ``torchrun``
            it outlives them.
        rank: this one.
        world: how many.
        limit: the time-out of messages, for the sentence.
    """

    def __init__(self, stores: list[Any], rank: int, world: int, limit: timedelta) -> None:
        self.rank, self.world = rank, world
        self._limit = limit
        self._store, self._own = stores
        for connection in stores:
            connection.set_timeout(timedelta(seconds=_PATIENCE / 2 * BEAT))
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="dpbam-pulse", daemon=True)
        self._own.set(f"host/{rank}", socket.gethostname())
        self._own.set(f"pulse/{rank}", "0")

    def __enter__(self) -> Watch:
        self._pulse.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def claim(self, sentence: str) -> bool:
        """Write down why the run ends; False if another rank has done so, or nobody can know."""
        try:
            mine = f"{self.rank}: {sentence}"
            return bool(self._store.compare_set(_ENDED, "", mine) == mine.encode())
        except RuntimeError:  # the store is gone: nobody else will say it
            return True

    def inquire(self, failure: Exception) -> str | None:
        """Why a message failed, in one sentence; None if another rank says it."""
        answer: list[str | None] = []
        looking = threading.Thread(target=lambda: answer.append(self._look(failure)), daemon=True)
        looking.start()
        looking.join((_LOOK + _PATIENCE) * BEAT)  # a store on a host that is cut off never answers
        return answer[0] if answer else self._nobody_answers()

    def _look(self, failure: Exception) -> str | None:
        try:
            if self._store.check([_ENDED]):
                return None
            before = self._pulses()
            time.sleep(_LOOK * BEAT)
            silent = [r for r, count in enumerate(self._pulses()) if count == before[r]]
            sentence = self._sentence([r for r in silent if r != self.rank], failure)
            return sentence if self.claim(sentence) else None
        except RuntimeError:
            return self._nobody_answers()

    def _sentence(self, lost: list[int], failure: Exception) -> str:
        if not lost:
            said = str(failure).strip().partition("\n")[0]
            return (
                f"the {self.world} ranks are alive but did not meet within "
                f"{self._limit.total_seconds():g} s ({said}): {_RESUME}, with a longer "
                "DPBAM_RANK_TIMEOUT"
            )
        hosts = [self._store.get(f"host/{r}").decode() for r in lost]
        names = ", ".join(f"{r} (on {host})" for r, host in zip(lost, hosts, strict=True))
        said = f"rank {names} is" if len(lost) == 1 else f"ranks {names} are"
        return f"{said} lost, of {self.world}: {_RESUME}"

    def _nobody_answers(self) -> str:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"rank {self.rank} (on {socket.gethostname()}) has lost the others: the launcher's "
            f"store at {where} does not answer; {_RESUME}"
        )

    def _pulses(self) -> list[bytes]:
        return list(self._store.multi_get([f"pulse/{r}" for r in range(self.world)]))

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT):
            count += 1
            try:
                self._own.set(f"pulse/{self.rank}", str(count))
            except RuntimeError:  # the store is gone: so is the run, as a message will show
                return
