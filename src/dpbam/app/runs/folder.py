"""The run folder: what lives where, and the lock that keeps a second run out.

=============================  ==========================================  ======================
file                           what it holds                               may be published
=============================  ==========================================  ======================
``model.safetensors``          the model                                   yes
``model.json``                 what a loader needs: architecture, classes  yes
``privacy-statement.md``       what is promised, and to whom               yes
``privacy-statement.json``     the same for machines                       yes
``statistics.jsonl``           norms and bias, released with noise         yes
``metrics.jsonl``              evaluations on the test data                see the statement
``config.toml``                the resolved configuration                  no (paths, the seed)
``ledger.jsonl``               every release, before it was made           no need to
``checkpoints/``               what resuming needs                         no
``non-private/``               facts taken from the data without noise     never
=============================  ==========================================  ======================
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.files import locked, read_json
from dpbam.app.runs.formats import FORMAT, check_format, current_config
from dpbam.app.runs.result import RunError

PUBLISHABLE = ("model.safetensors", "model.json", "privacy-statement.md", "privacy-statement.json")
_LOCK = ".lock"


class RunFolder:
    """Paths within one run folder.

    Example:
        >>> RunFolder("runs/first").metrics.as_posix()
        'runs/first/metrics.jsonl'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.statistics = self.path / "statistics.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "model.safetensors"
        self.model = self.path / "model.json"
        self.statement = self.path / "privacy-statement.md"
        self.statement_json = self.path / "privacy-statement.json"
        self.non_private = self.path / "non-private"
        self.facts = self.non_private / "run.json"
        self.training_log = self.non_private / "training.jsonl"

    def read_facts(self) -> dict[str, Any]:
        """What was settled when the run began.

        Raises:
            RunError: if there is no run here.
        """
        if not self.facts.exists():
            raise RunError(
                f"there is no run to resume in {self.path}: start one without --resume"
                if self.path.exists()
                else f"there is no run folder {self.path}: start one without --resume"
            )
        facts = read_json(self.facts)
        check_format(self.facts, facts)
        if not isinstance(facts.get("config"), dict) or not isinstance(facts.get("run"), str):
            raise RunError(f"{self.facts} is damaged: restore it from a backup")
        return {**facts, "format": FORMAT, "config": current_config(facts["config"])}

    @contextmanager
    def opened(self, *, resume: bool) -> Iterator[None]:
        """Hold the folder's lock; a new run's folder is made, and is gone again if it is refused.

        Raises:
            RunError: if another process is at work here, or the folder holds something else.
        """
        made = [] if resume else self._make()
        self._check(resume=resume)
        busy = f"another run is at work in {self.path}: wait for it, or choose another --out"
        with locked(self.path / _LOCK, busy=busy):
            self._check(resume=resume)  # again: another run may have come and gone
            try:
                yield
            except BaseException:
                if made and not self.facts.exists():
                    shutil.rmtree(self.path, ignore_errors=True)
                    for parent in made[1:]:  # those that were made for it, if nobody uses them
                        with suppress(OSError):
                            parent.rmdir()
                raise

    def _make(self) -> list[Path]:
        """Make the folder; what was not there: itself, then its parents."""
        try:
            made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"the run folder {self.path} cannot be made: {error.strerror}") from None
        return made

    def strangers(self) -> Iterator[str]:
        """What no run makes: links that lead out, and pipes or devices, which may never end."""
        root = self.path.resolve()
        for path in self.path.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                yield f"{path} is a link that leads out of the run folder"
            elif path.exists() and not path.is_file() and not path.is_dir():
                yield f"{path} is no plain file"

    def check_links(self) -> None:
        """Refuse a folder with links out: writing through one could change any file of the user's.

        Raises:
            RunError: naming the link, or the pipe or device.
        """
        for what in self.strangers():
            raise RunError(f"{what}: remove it")

    def _check(self, *, resume: bool) -> None:
        self.check_links()
        if resume:
            self.read_facts()
        elif self.facts.exists():
            raise RunError(
                f"{self.path} holds a run already: go on with it by --resume, or choose another "
                "--out"
            )
        elif not all(self._is_leftover(p) for p in self.path.iterdir()):
            raise RunError(f"{self.path} is not empty: choose another --out")

    def _is_leftover(self, path: Path) -> bool:
        """Whether a run that was killed before it began may have left it: its ledger is empty."""
        if path.name in (_LOCK, self.non_private.name):
            return True
        name = self.ledger.name
        return path.name in (name, f".{name}.tmp") and path.stat().st_size == 0


def stored_config(out: str | Path) -> RunConfig:
    """The configuration of the run in ``out``, to resume it from.

    Raises:
        RunError: if there is no run.
    """
    return RunConfig.from_mapping(RunFolder(out).read_facts()["config"])
