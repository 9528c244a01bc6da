"""One writer per file: a lock that a process holds, and that the system frees when it ends.

The lock is on the file itself, not on its name, so symbolic and hard links share it. Objects and
threads of one process share it, too, and take turns. A forked child does not inherit it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from pathlib import Path

from dpbam._jsonl import sync_folder
from dpbam.errors import ArgumentError

Identity = tuple[int, int]  # device and inode


class WriterLock:
    """The lock of this process on one file, freed by ``close()``, or with its last user."""

    def __init__(self, descriptor: int) -> None:
        self.identity = identify(os.fstat(descriptor))
        _identities.add(self.identity)
        #: Frees the lock, once. In a forked child, the parent's is left alone.
        self.close = weakref.finalize(self, _release, descriptor, self.identity)
        self.close.atexit = False  # the end of the process does it


def _release(descriptor: int, identity: Identity) -> None:
    os.close(descriptor)
    _identities.discard(identity)


#: threads of this process take turns
turn = threading.RLock()
_locks: weakref.WeakValueDictionary[Identity, WriterLock] = weakref.WeakValueDictionary()
_identities: set[Identity] = set()  # locks of this process, those that are being freed included
_PAUSE, _PAUSES = 0.001, 2000  # seconds between attempts at a lock that a thread is freeing


def identify(status: os.stat_result) -> Identity:
    """Return what two names of one file have in common."""
    return status.st_dev, status.st_ino


def hold(path: Path, *, create: bool) -> WriterLock:
    """Return this process's lock on the file, taken now unless it has it already.

    Guarantee: while the lock exists, no other process gets one for the same file, under any name.

    Assumptions: the file system's locks work, between machines, too, if several write to it.

    Proof: ``flock`` on the file's inode, exclusive; the name is compared after it was taken.

    Args:
        path: the file.
        create: whether to create a missing file; its name is then on disk on return.

    Raises:
        ArgumentError: if another process has the lock, or the file system has no locks.
        OSError: if the file cannot be opened.
    """
    descriptor = _open(path, create=create)
    lock = _locks.get(identify(os.fstat(descriptor)))
    if lock is not None:
        os.close(descriptor)
        return lock
    try:
        _flock(descriptor, path)
        if identify(os.stat(path)) != identify(os.fstat(descriptor)):
            raise ArgumentError(f"{path} was replaced at this moment: end what replaced it")
    except BaseException:
        os.close(descriptor)
        raise
    lock = WriterLock(descriptor)
    _locks[lock.identity] = lock
    return lock


def _open(path: Path, *, create: bool) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        if not create:
            raise
    descriptor = os.open(path, flags | os.O_CREAT, 0o666)
    sync_folder(path.parent)
    return descriptor


def _flock(descriptor: int, path: Path) -> None:
    try:
        import fcntl

        for _ in range(_PAUSES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                # the last ledger of another thread may be ending: its lock is no object any more,
                # and not yet free
                if identify(os.fstat(descriptor)) not in _identities:
                    raise
                time.sleep(_PAUSE)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArgumentError(
            f"another process is writing to {path}, and each would count its own steps alone: "
            "wait until it has ended (or calls ledger.close()), or give this training a ledger of "
            "its own"
        ) from None
    except (OSError, ImportError) as error:
        raise ArgumentError(
            f"{path} cannot be locked ({error}), so a second process could write to it unnoticed: "
            "keep the ledger on a file system that has locks, such as a local disk"
        ) from None


def _forget() -> None:
    """In a forked child: the locks are the parent's, and another thread may have had its turn."""
    global turn
    turn = threading.RLock()
    for lock in list(_locks.values()):
        lock.close()
    _locks.clear()
    _identities.clear()


os.register_at_fork(after_in_child=_forget)
