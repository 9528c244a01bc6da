"""Measures the clipping bias of a run's model, or of a new one, on batches of its training data.

Not protected by privacy, do not share: it reads the data without noise, and writes no ledger.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from dpbam import _validate
from dpbam.app.runs.automatic import best_change
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.preparation import Prepared, prepare
from dpbam.errors import ArgumentError
from dpbam.privacy.plan import replace_quietly

if TYPE_CHECKING:
    from torch import Tensor

    from dpbam.bias import Advice, BiasRecord, Flatness

NOTE = (
    "Not protected by privacy: do not share. Computed from the training data without noise, for "
    "the operator only. Choosing settings by it uses those data, which no epsilon covers."
)
_ADVICE_UNITS = 256  # samples that advice and flatness look at
#: The numbers that are shown of a batch, in words.
READINGS = {
    "bias": "bias, its length",
    "relative_bias": "bias over the gradient's length",
    "a": "a: what is left along the gradient",
    "c_norm": "|c|: what was added perpendicular to it",
    "magnitude_share": "share of the bias that is length",
    "direction_share": "share of the bias that is direction",
    "cosine": "cosine, clipped with unclipped",
    "private_cosine": "cosine, noised with unclipped",
    "noise_share": "noise's share of the squared error",
}


@dataclass(frozen=True)
class Measured:
    """One record per batch, and advice and flatness if they were asked for.

    ``gains_most`` is what the study of the defaults says about settings like these, or empty.
    """

    records: tuple[BiasRecord, ...]
    advice: Advice | None
    flatness: Flatness | None
    gains_most: str = ""

    def means(self, reference: str) -> dict[str, float] | None:
        """Return means over the batches against "plain" or "own"; None if not measured."""
        readings = [getattr(record, f"non_private_against_{reference}") for record in self.records]
        if any(reading is None for reading in readings):
            return None
        return {name: fmean(getattr(reading, name) for reading in readings) for name in READINGS}

    def to_dict(self) -> dict[str, object]:
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
        config: the run's settings.
        run: a run folder, whose model (or latest checkpoint, if it has not ended) is measured;
            None: a model with new weights.
        batches: how many.
        advice: also estimate what other settings would do.
        flatness: also measure L_Z, L_BAO and the Hessian's largest eigenvalue.
    """
    from dpbam.bias import BiasLens

    _validate.count("batches", batches)
    cache = None if run is None else RunFolder(run).non_private
    prepared = prepare(config, noise_multiplier=_sigma(config, run), cache=cache)
    if prepared.config.in_closed_form:
        raise ArgumentError(
            "the head in closed form has no gradients, so there is no bias to measure: take head "
            "descent"
        )
    if run is not None:
        _load_weights(prepared, run)
    lens = BiasLens(eta=True, plain=True)
    plan = replace_quietly(prepared.plan, released_before=None)  # no counts are released here
    oracle = replace(prepared, plan=plan).oracle(observer=lens)
    rows = prepared.fit(oracle).rows
    poisson_batches = oracle.batches(prepared.seen.train, units=prepared.units)
    for images, labels, units in islice(poisson_batches, batches):
        oracle.backward(images, labels, units)  # its ledger is in memory: nothing is released
    change = ""
    if advice:
        change = best_change(prepared.config, prepared.plan.n, prepared.train.num_classes)
    return Measured(
        tuple(lens.records),
        _advise(prepared, rows) if advice else None,
        _flatness(prepared, rows) if flatness else None,
        f"Gains most, by the study of the defaults: {change}." if change else "",
    )


def _sigma(config: RunConfig, run: Path | None) -> float | None:
    """Return the run's sigma, if its settings are the same: to calibrate again takes seconds."""
    if run is None:
        return None
    facts = RunFolder(run).read_facts()
    same = facts.config.replace(seed=config.seed) == config
    return (facts.noise_multiplier or None) if same else None


def _load_weights(prepared: Prepared, run: Path) -> None:
    """Load the model that the run handed out, or its latest checkpoint's."""
    from dpbam.app.runs import checkpoint
    from dpbam.app.runs.model_file import load_run_model

    folder = RunFolder(run)
    latest = None
    if not folder.model.exists():
        latest = checkpoint.load_latest(folder.checkpoints, folder.read_facts().run)
    if latest:
        prepared.model.load_state_dict(latest["model"])
    else:
        loaded = load_run_model(run, own_model=prepared.config.model)
        prepared.model.load_state_dict(loaded.module.state_dict())


def _some(prepared: Prepared) -> tuple[Tensor, Tensor]:
    """Return a few records as the model sees them in evaluation: not augmented."""
    import numpy as np

    from dpbam.data.dataset import model_input

    few = np.random.default_rng(0).permutation(len(prepared.train))[:_ADVICE_UNITS]
    images, labels = prepared.seen.train.batch(np.sort(few))
    return model_input(images).to(prepared.device), labels.to(prepared.device)


def _lam(prepared: Prepared) -> float:
    from dpbam.app.runs.build import lam_at_the_end

    return lam_at_the_end(prepared.config, prepared.model, prepared.plan.steps)


def _advise(prepared: Prepared, rows: int) -> Advice:
    from torch import nn

    from dpbam.bias import advise

    loss, method = nn.CrossEntropyLoss(reduction="none"), prepared.config.method
    lam = _lam(prepared) if method == "bam" else 0.0
    return advise(
        prepared.model, loss, prepared.plan, [_some(prepared)], lam=lam,
        physical_batch_size=rows,
    )  # fmt: skip


def _flatness(prepared: Prepared, rows: int) -> Flatness:
    from torch import nn

    from dpbam.bias import measure_flatness

    loss = nn.CrossEntropyLoss(reduction="none")
    return measure_flatness(
        prepared.model, loss, *_some(prepared), lam=_lam(prepared),
        physical_batch_size=rows,
    )  # fmt: skip
