"""``dpbam epsilon`` and ``dpbam calibrate``: what a training costs, and what a budget allows."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from dpbam import _validate
from dpbam.app.cli.flags import settings_as_flags
from dpbam.app.cli.output import Json, option, print_facts
from dpbam.app.runs.config import default_batch_size
from dpbam.app.runs.settings import setting
from dpbam.errors import ArgumentError
from dpbam.privacy import accounting, calibration
from dpbam.privacy.plan import default_delta


class Mechanism(BaseModel):
    """Steps and sampling rate of a training, as the two commands take them."""

    n: int | None = setting("Training", "Units of privacy in the training set.")
    batch_size: int | None = setting("Training", "Expected batch size; q = batch size / n.")
    sampling_rate: float | None = setting("Training", "q, in place of n and batch size.")
    epochs: float | None = setting("Training", "Expected passes over the data: T q.")
    steps: int | None = setting("Training", "T itself, in place of epochs.")
    delta: float | None = setting(
        "Training", "Delta.", unset="the largest power of ten that is at most 1/(100 n), n in units"
    )
    accountant: str = setting("Training", "The accountant: pld (tight) or rdp.", "pld")

    def q(self) -> float:
        """Return the sampling rate as given, or batch_size / n."""
        n, batch_size, rate = self.n, self.batch_size, self.sampling_rate
        if rate is not None and n is None and batch_size is None:
            return _validate.positive("--sampling-rate", rate)
        if rate is not None or n is None or batch_size is None:
            raise ArgumentError("give either --sampling-rate, or both --n and --batch-size")
        _validate.count("--n", n)
        _validate.count("--batch-size", batch_size)
        if batch_size > n:
            raise ArgumentError(
                f"--batch-size {batch_size} exceeds --n {n}, the number of units: give a smaller "
                f"one, such as a run's default of {default_batch_size(n)}"
            )
        return batch_size / n

    def count(self) -> int:
        """Return the steps T as given, or epochs / q, rounded."""
        if (self.epochs is None) == (self.steps is None):
            raise ArgumentError("give either --epochs or --steps, and not both")
        if self.steps is not None:
            return _validate.count("--steps", self.steps)
        return max(1, round(_validate.positive("--epochs", self.epochs) / self.q()))

    def chosen_delta(self) -> float:
        """Return delta as given, else the default of a run."""
        if self.delta is not None:
            return _validate.probability("--delta", self.delta)
        if self.n is None:
            raise ArgumentError("give --delta: without --n there is no default for it")
        return default_delta(self.n)


@settings_as_flags(Mechanism)
def epsilon(
    flags: dict[str, object],
    noise_multiplier: Annotated[float, option("Sigma.")],
    json: Json = False,
) -> None:
    """Calculate the epsilon of a training with a given noise multiplier.

    The same for DP-SGD, DP-SAT and BAM: they cost the same.

    Examples:
        $ dpbam epsilon --noise-multiplier 1.731 --n 50000 --batch-size 4096 --steps 1000 --delta
            1e-5
        $ dpbam epsilon --noise-multiplier 1 --sampling-rate 0.01 --steps 500 --delta 1e-5 --json
    """
    mechanism = Mechanism.model_validate(flags)
    q, count, delta = mechanism.q(), mechanism.count(), mechanism.chosen_delta()
    accountant = mechanism.accountant
    answer = {
        "epsilon": accounting.epsilon(noise_multiplier, q, count, delta, accountant=accountant),
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "sampling_rate": q,
        "steps": count,
        "accountant": accounting.accountant_version(accountant),
    }
    print_facts(answer, json=json)


@settings_as_flags(Mechanism)
def calibrate(
    flags: dict[str, object],
    epsilon: Annotated[float, option("The budget.")],
    noise_multiplier: Annotated[
        float | None, option("Sigma; then the steps are calculated.")
    ] = None,
    json: Json = False,
) -> None:
    """Find the least noise multiplier for a number of steps; or, given one, the most steps.

    The epsilon of the answer never exceeds the budget.

    Examples:
        $ dpbam calibrate --epsilon 8 --n 50000 --batch-size 4096 --epochs 75 --delta 1e-5
        $ dpbam calibrate --epsilon 8 --noise-multiplier 2 --n 50000 --batch-size 4096
        $ dpbam calibrate --epsilon 1 --delta 1e-6 --sampling-rate 0.01 --steps 1000 --json
    """
    mechanism = Mechanism.model_validate(flags)
    q, delta, accountant = mechanism.q(), mechanism.chosen_delta(), mechanism.accountant
    if noise_multiplier is None:
        count = mechanism.count()
        sigma = calibration.noise_multiplier(epsilon, delta, q, count, accountant=accountant)
    elif mechanism.epochs is not None or mechanism.steps is not None:
        raise ArgumentError(
            "give --noise-multiplier, or --epochs or --steps: the other is calculated"
        )
    else:
        sigma = noise_multiplier
        count = calibration.max_steps(epsilon, delta, sigma, q, accountant=accountant)
    answer = {
        "noise_multiplier": sigma,
        "steps": count,
        "epochs": count * q,
        "epsilon": accounting.epsilon(sigma, q, count, delta, accountant=accountant),
        "delta": delta,
        "sampling_rate": q,
        "accountant": accounting.accountant_version(accountant),
    }
    print_facts(answer, json=json)
