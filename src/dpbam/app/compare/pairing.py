"""Whether runs are paired: with the same data, batches and initial weights.

A method with better data, other batches or other weights would win for a reason that is not the
method. So every run has digests of the three (:meth:`dpbam.app.runs.RunFolder.pairing`), and a
comparison checks them (:func:`check_pairs`).

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

from collections.abc import Sequence

from dpbam.app.runs import ConfigError, RunRecord, RunResult

WHAT = {
    "data": "training data",
    "test_data": "test data",
    "initial_weights": "initial weights",
    "batches": "batches",
}


def check_pairs(runs: Sequence[RunResult | RunRecord]) -> None:
    """Refuse runs of one seed that do not share what they must, naming two and what differs.

    Example:
        >>> from types import SimpleNamespace as Run
        >>> check_pairs([Run(arm="dp-sgd", seed=0, pairing={"data": "a"}),
        ...              Run(arm="bam", seed=0, pairing={"data": "b"})])
        Traceback (most recent call last):
        dpbam.app.runs.config.ConfigError: bam and dp-sgd of seed 0 do not share their training...
    """
    first: dict[int | None, RunResult | RunRecord] = {}
    for run in runs:
        other = first.setdefault(run.seed, run)
        same_size = run.pairing.get("batch_size") == other.pairing.get("batch_size")
        for key, what in WHAT.items():
            pair = {run.pairing.get(key), other.pairing.get(key)}
            if None in pair or len(pair) == 1 or (key == "batches" and not same_size):
                continue
            raise ConfigError(
                f"{run.arm} and {other.arm} of seed {run.seed} do not share their {what}, so "
                "their difference is not the methods' alone and they are not compared: train "
                "them again on the same data"
            )
