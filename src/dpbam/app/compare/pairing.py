"""Whether runs are really paired: same data, same initial weights, same batches for one seed.

A method that was given better data, other batches or other weights would win for a reason that is
not the method. So each run leaves digests of the three behind, and a comparison checks them.

==================  ==============================================================================
digest              of what
==================  ==============================================================================
``data``            the training set: labels and pixels (:meth:`dpbam.data.DataSet.fingerprint`)
``test_data``       the test set, likewise
``initial_weights`` all parameters and buffers before the first step
``batches``         the realised sizes of all Poisson batches, in order; compared between runs
                    of one ``batch_size``
==================  ==============================================================================

They come from the data without noise: they are for public data and for the operator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dpbam.app.runs.config import ConfigError
from dpbam.app.runs.files import read_json_lines
from dpbam.app.runs.folder import RunFolder

WHAT = {
    "data": "training data",
    "test_data": "test data",
    "initial_weights": "initial weights",
    "batches": "batches",
}


class Paired(Protocol):
    """What the check needs to know of a run."""

    @property
    def name(self) -> str:
        """Which contender's run it is."""

    @property
    def seed(self) -> int:
        """Runs of one seed are paired."""

    @property
    def pairing(self) -> Mapping[str, str]:
        """Its digests."""


def fingerprints(out: Path) -> dict[str, str]:
    """The digests of the run in the folder ``out``."""
    folder = RunFolder(out)
    facts = folder.read_facts()
    sizes = [row["non_private_batch_size"] for row in read_json_lines(folder.training_log)]
    return {
        "data": facts["non_private_fingerprint"][:16],
        "test_data": facts["non_private_test_fingerprint"][:16],
        "initial_weights": facts["initial_weights"][:16],
        "batch_size": str(facts["config"]["batch_size"]),
        "batches": hashlib.sha256(repr(sizes).encode()).hexdigest()[:16],
    }


def check_pairs(runs: Sequence[Paired]) -> None:
    """Refuse runs of one seed that do not share what they must.

    Raises:
        ConfigError: naming the two runs and what differs.

    Example:
        >>> from types import SimpleNamespace as Run
        >>> check_pairs([Run(name="dp-sgd", seed=0, pairing={"data": "a"}),
        ...              Run(name="bam", seed=0, pairing={"data": "b"})])
        Traceback (most recent call last):
        dpbam.app.runs.config.ConfigError: bam and dp-sgd of seed 0 do not share their training...
    """
    first: dict[int, Paired] = {}
    for run in runs:
        other = first.setdefault(run.seed, run)
        same_size = run.pairing.get("batch_size") == other.pairing.get("batch_size")
        for key, what in WHAT.items():
            mine, its = run.pairing.get(key), other.pairing.get(key)
            if mine is None or its is None or (key == "batches" and not same_size):
                continue
            if mine != its:
                raise ConfigError(
                    f"{run.name} and {other.name} of seed {run.seed} do not share their {what}: "
                    "their difference is not the methods' alone, so they are not compared; "
                    "train them again on the same data"
                )
