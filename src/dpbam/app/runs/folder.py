"""The run folder: what lives where, and the lock that keeps a second run out.

=============================  ==========================================  ======================
file                           what it holds                               may be published
=============================  ==========================================  ======================
``model.safetensors``          the model                                   yes
``model.json``                 what a loader needs: architecture, classes  yes
``privacy-statement.md``       what is promised, and to whom               yes
``privacy-statement.json``     the same for machines                       yes
``privacy-statement.html``     the same to print                           yes
``privacy-statement.sig``      the operator's signature, if there is one   yes
``README.md``                  the model card, from the files above        yes
``statistics.jsonl``           norms and bias, released with noise         yes
``class-counts.json``          class counts, released with noise           yes
``feature-centre.json``        mean of the features, released with noise   yes
``metrics.jsonl``              evaluations on the test data                see the statement
``config.toml``                the resolved configuration                  no (paths, the seed)
``ledger.jsonl``               every release, before it was made           no need to
``checkpoints/``               what resuming needs                         no
``non-private/``               facts taken from the data without noise     never
=============================  ==========================================  ======================
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpbam._jsonl import sync_folder
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.documents import RunFacts
from dpbam.app.runs.files import locked
from dpbam.app.runs.rows import ComparedRow, TrainingRow, read_rows
from dpbam.app.runs.run import RunError

PUBLISHABLE = (
    "model.safetensors", "model.json",
    "privacy-statement.md", "privacy-statement.json", "privacy-statement.html", "README.md",
)  # fmt: skip
MARK = "NOT-FOR-RELEASE.md"  # of a search's trial
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
        self.class_counts = self.path / "class-counts.json"
        self.centre = self.path / "feature-centre.json"
        self.ledger = self.path / "ledger.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "model.safetensors"
        self.model = self.path / "model.json"
        self.statement = self.path / "privacy-statement.md"
        self.statement_json = self.path / "privacy-statement.json"
        self.statement_html = self.path / "privacy-statement.html"
        self.signature = self.path / "privacy-statement.sig"
        self.card = self.path / "README.md"
        self.non_private = self.path / "non-private"
        self.facts = self.non_private / "run.json"
        self.training_log = self.non_private / "training.jsonl"
        self.evaluations = self.non_private / "evaluations.jsonl"
        self.bias = self.non_private / "bias.jsonl"
        self.warnings = self.non_private / "warnings.txt"

    @property
    def started(self) -> bool:
        """Whether a run was begun here, finished or not."""
        return self.facts.exists()

    def read_facts(self) -> RunFacts:
        """Return what was settled when the run began."""
        if not self.started:
            raise RunError(
                f"there is no run in {self.path}: give the folder of one, or begin it with "
                "dpbam train, without --resume"
            )
        return RunFacts.read(self.facts)

    def withdraw_statement(self) -> tuple[bytes, bytes] | None:
        """Remove statement, signature and card; return the signed bytes and the signature."""
        signed = None
        if self.statement_json.exists() and self.signature.exists():
            signed = self.statement_json.read_bytes(), self.signature.read_bytes()
        for path in (self.signature, self.statement_json, self.statement, self.statement_html,
                     self.card):  # fmt: skip
            path.unlink(missing_ok=True)
        sync_folder(self.path)
        return signed

    def pairing(self) -> dict[str, str]:
        """Digest what runs of one seed must share: data, initial weights, and the batches' sizes.

        They come from the data without noise: for public data, and for the operator.
        """
        facts = self.read_facts()
        rows = read_rows(self.training_log, TrainingRow)
        sizes = [row.non_private_batch_size for row in rows]
        return {
            "data": facts.non_private_fingerprint[:16],
            "test_data": facts.non_private_test_fingerprint[:16],
            "initial_weights": facts.initial_weights[:16],
            "batch_size": str(round(facts.sampling_rate * facts.n)),
            "batches": hashlib.sha256(repr(sizes).encode()).hexdigest()[:16],
        }

    def count_evaluations(self, *, seeded: bool) -> int:
        """Return how often the test data was evaluated, also in steps that a restart lost.

        A seeded run repeats a lost step with the same result, which is not a second release.
        """
        steps = [row.step for row in read_rows(self.evaluations, ComparedRow)]
        return len(set(steps)) if seeded else len(steps)

    @contextmanager
    def opened(self, *, resume: bool) -> Iterator[None]:
        """Hold the folder's lock; a new run's folder is made, and removed if the run is refused.

        Refused while another process is at work here, and where the folder holds something else.
        """
        new_folders = [] if resume else self._make()
        self._check(resume=resume)
        busy = f"another run is at work in {self.path}: wait for it, or choose another --out"
        with locked(self.path / _LOCK, busy=busy):
            self._check(resume=resume)  # again: another run may have come and gone
            try:
                yield
            except BaseException:
                if new_folders and not self.started:
                    shutil.rmtree(self.path, ignore_errors=True)
                    for parent in new_folders[1:]:  # those that were made for it, if they are empty
                        with suppress(OSError):
                            parent.rmdir()
                raise

    def _make(self) -> list[Path]:
        """Make the folder, and return what was not there: itself, then its parents."""
        try:
            new_folders = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"the run folder {self.path} cannot be made: {error.strerror}") from None
        return new_folders

    def strangers(self) -> Iterator[str]:
        """Describe what no run makes: links that lead out, pipes and devices, which may not end."""
        root = self.path.resolve()
        for path in self.path.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                yield f"{path} is a link that leads out of the run folder"
            elif path.exists() and not path.is_file() and not path.is_dir():
                yield f"{path} is no plain file"

    def check_links(self) -> None:
        """Refuse a folder with links out: writing through one could change any file."""
        for what in self.strangers():
            raise RunError(f"{what}: remove it")

    def _check(self, *, resume: bool) -> None:
        self.check_links()
        if resume:
            self.read_facts()
        elif self.started:
            raise RunError(
                f"{self.path} holds a run already: resume it with --resume, or choose another --out"
            )
        elif not all(self._is_leftover(p) for p in self.path.iterdir()):
            raise RunError(f"{self.path} is not empty: choose another --out")

    def _is_leftover(self, path: Path) -> bool:
        """Whether a search, or a run that was killed before it began, may have left the path."""
        if path.name in (_LOCK, MARK, self.non_private.name):
            return True
        name = self.ledger.name
        return path.name in (name, f".{name}.tmp") and path.stat().st_size == 0


def stored_config(out: str | Path) -> RunConfig:
    """Return the configuration of the run in ``out``, to resume it from."""
    return RunFolder(out).read_facts().config
