"""Find the rank that is lost: each rank has a heartbeat in the launcher's store.

The error of a failed message is "connection closed", or there is none until the time-out, and it
does not name the rank that failed first, since the others fail one after another. So every rank
increments a counter about once per second. After a failure, the ranks whose counters no longer
change are lost. The first rank that notices records it and reports the error; the others end
without a message.
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
_RESUME = "what was released is on the ledger; continue with --resume"


class Watch:
    """The heartbeat of this rank, and checks of the others.

    Args:
        stores: two connections to the ranks' shared store, one per thread; with ``torchrun`` the
            store outlives the ranks.
        rank: of this process.
        world: the number of ranks.
        limit: the time-out of messages, for the error.
    """

    def __init__(self, stores: list[Any], rank: int, world: int, limit: timedelta) -> None:
        self.rank, self.world = rank, world
        self._limit = limit
        self._store, self._private_store = stores
        for connection in stores:
            connection.set_timeout(timedelta(seconds=_PATIENCE / 2 * BEAT))
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="dpbam-pulse", daemon=True)
        self._private_store.set(f"host/{rank}", socket.gethostname())
        self._private_store.set(f"pulse/{rank}", "0")

    def __enter__(self) -> Watch:
        self._pulse.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def claim(self, sentence: str) -> bool:
        """Record why the run ends; return False if another rank has recorded it."""
        try:
            mine = f"{self.rank}: {sentence}"
            return bool(self._store.compare_set(_ENDED, "", mine) == mine.encode())
        except RuntimeError:  # the store is lost: no other rank can report it
            return True

    def inquire(self, failure: Exception) -> str | None:
        """Return why a message failed, in one sentence; None if another rank reports it."""
        answer: list[str | None] = []
        looking = threading.Thread(target=lambda: answer.append(self._look(failure)), daemon=True)
        looking.start()
        looking.join((_LOOK + _PATIENCE) * BEAT)  # the store of an unreachable host never answers
        return answer[0] if answer else self._store_lost()

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
            return self._store_lost()

    def _sentence(self, lost: list[int], failure: Exception) -> str:
        if not lost:
            cause = str(failure).strip().partition("\n")[0]
            return (
                f"the {self.world} ranks are alive but did not meet within "
                f"{self._limit.total_seconds():g} s ({cause}): {_RESUME}, with a longer "
                "DPBAM_RANK_TIMEOUT"
            )
        hosts = [self._store.get(f"host/{r}").decode() for r in lost]
        names = ", ".join(f"{r} (on {host})" for r, host in zip(lost, hosts, strict=True))
        who = f"rank {names} is" if len(lost) == 1 else f"ranks {names} are"
        return f"{who} lost, of {self.world}: {_RESUME}"

    def _store_lost(self) -> str:
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
                self._private_store.set(f"pulse/{self.rank}", str(count))
            except RuntimeError:  # the store is lost; the next message will fail
                return
