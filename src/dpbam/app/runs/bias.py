"""Measures the bias of a run's model, or of a fresh one, on batches of its training data.

Nothing here is private: it looks at the data without noise, writes no ledger, and must stay with
the operator.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dpbam import _validate
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.preparation import Prepared, prepare

if TYPE_CHECKING:
    from torch import Tensor

    from dpbam.bias import Advice, BiasRecord, Flatness

NOTE = (
    "Not private: computed from the training data without noise, for the operator alone. Choosing "
    "settings by it uses private data."
)
_ADVICE_UNITS = 256  # samples that advice and flatness look at
READING = (
    "bias", "relative_bias", "a", "c_norm", "magnitude_share", "direction_share", "cosine",
    "private_cosine", "noise_share",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What was found.

    Attributes:
        records: one a batch.
        advice: if it was asked for.
        flatness: likewise.
    """

    records: tuple[BiasRecord, ...]
    advice: Advice | None
    flatness: Flatness | None

    def means(self, reference: str) -> dict[str, float] | None:
        """Means over the batches against "plain" or "own"; None where it was not measured."""
        readings = [getattr(record, f"non_private_against_{reference}") for record in self.records]
        if any(reading is None for reading in readings):
            return None
        return {name: fmean(getattr(reading, name) for reading in readings) for name in READING}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "note": NOTE,
            "non_private_against_plain": self.means("plain"),
            "non_private_against_own": self.means("own"),
            "non_private_records": [asdict(record) for record in self.records],
            "non_private_advice": asdict(self.advice) if self.advice else None,
            "non_private_flatness": asdict(self.flatness) if self.flatness else None,
        }


def measure(
    config: RunConfig,
    *,
    run: Path | None = None,
    batches: int = 4,
    advice: bool = False,
    flatness: bool = False,
) -> Measured:
    """Measure at fixed parameters, on Poisson batches of the training set.

    Args:
        config: the run's, or of a run that might be.
        run: a run folder, whose model (or latest checkpoint, if it has not ended) is measured;
            None: a model with new weights.
        batches: how many.
        advice: what other settings would do.
        flatness: L_Z, L_BAO and the Hessian's largest eigenvalue.

    Raises:
        RunError: if the folder has neither model nor checkpoint.
    """
    from dpbam.bias import BiasLens

    _validate.count("batches", batches)
    prepared = prepare(config, noise_multiplier=_sigma(config, run))
    if run is not None:
        _load_weights(prepared, run)
    oracle = prepared.oracle()
    lens = BiasLens(eta=True, plain=True)
    oracle.observer = lens
    drawn = oracle.batches(prepared.train, units=prepared.units)
    for images, labels, units in islice(drawn, batches):
        oracle.backward(images, labels, units)  # its ledger is in memory: nothing is released
    return Measured(
        tuple(lens.records),
        _advise(prepared) if advice else None,
        _flatness(prepared) if flatness else None,
    )


def _sigma(config: RunConfig, run: Path | None) -> float | None:
    """The sigma that the run found, if its settings are as they were: calibrating takes seconds."""
    if run is None:
        return None
    facts = RunFolder(run).read_facts()
    same = RunConfig.from_mapping(facts["config"]).replace(seed=config.seed) == config
    return (facts["noise_multiplier"] or None) if same else None


def _load_weights(prepared: Prepared, run: Path) -> None:
    """The model that the run hands out, or its latest checkpoint's."""
    from dpbam.app.runs import checkpoint
    from dpbam.app.runs.model_file import load_run_model

    folder = RunFolder(run)
    latest = None
    if not folder.model.exists():
        latest = checkpoint.load_latest(folder.checkpoints, folder.read_facts()["run"])
    own = prepared.config.model
    state = (
        latest.state["model"] if latest else load_run_model(run, own_model=own).module.state_dict()
    )
    prepared.model.load_state_dict(state)


def _some(prepared: Prepared) -> tuple[Tensor, Tensor]:
    """A few records as the model sees them in evaluation: no augmentation."""
    import numpy as np

    from dpbam.data import to_float

    few = np.random.default_rng(0).permutation(len(prepared.train))[:_ADVICE_UNITS]
    images, labels = prepared.train.batch(np.sort(few))
    return to_float(images).to(prepared.device), labels.to(prepared.device)


def _advise(prepared: Prepared) -> Advice:
    from torch import nn

    from dpbam.bias import advise

    loss, method = nn.CrossEntropyLoss(reduction="none"), prepared.config.method
    lam = prepared.config.lam if method == "bam" else 0.0
    return advise(
        prepared.model, loss, prepared.plan, [_some(prepared)], lam=lam,
        physical_batch_size=prepared.physical_batch_size,
    )  # fmt: skip


def _flatness(prepared: Prepared) -> Flatness:
    from torch import nn

    from dpbam.bias import measure_flatness

    loss = nn.CrossEntropyLoss(reduction="none")
    return measure_flatness(
        prepared.model, loss, *_some(prepared), lam=prepared.config.lam,
        physical_batch_size=prepared.physical_batch_size,
    )  # fmt: skip
