"""``dpbam calibrate``: the noise, or the steps, that keep within a budget."""

from __future__ import annotations

from typing import Annotated

import typer

from dpbam.app.cli import mechanism
from dpbam.app.cli.output import console, examples, facts, print_json
from dpbam.errors import ArgumentError

EXAMPLES = examples(
    "dpbam calibrate --epsilon 8 --n 50000 --batch-size 4096 --epochs 75 --delta 1e-5",
    "dpbam calibrate --epsilon 8 --noise-multiplier 2 --n 50000 --batch-size 4096",
    "dpbam calibrate --epsilon 1 --delta 1e-6 --sampling-rate 0.01 --steps 1000 --json",
)


def run(
    epsilon: Annotated[float, typer.Option(help="The budget.")],
    n: mechanism.N = None,
    batch_size: mechanism.BatchSize = None,
    sampling_rate: mechanism.SamplingRate = None,
    epochs: mechanism.Epochs = None,
    steps: mechanism.Steps = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Sigma; then the steps are calculated.")
    ] = None,
    delta: mechanism.Delta = None,
    accountant: mechanism.Accountant = "pld",
    json: mechanism.Json = False,
) -> None:
    """Find the least noise multiplier for a number of steps; or, given one, the most steps.

    The epsilon of the answer never exceeds the budget.
    """
    from dpbam.privacy import accounting, calibration

    q = mechanism.sampling_rate(n, batch_size, sampling_rate)
    chosen = mechanism.delta(delta, n)
    if noise_multiplier is None:
        count = mechanism.steps(epochs, steps, q)
        sigma = calibration.noise_multiplier(epsilon, chosen, q, count, accountant=accountant)
    elif epochs is not None or steps is not None:
        raise ArgumentError(
            "give --noise-multiplier, or --epochs or --steps: the other is calculated"
        )
    else:
        sigma = noise_multiplier
        count = calibration.max_steps(epsilon, chosen, sigma, q, accountant=accountant)
    answer = {
        "noise_multiplier": sigma,
        "steps": count,
        "epochs": count * q,
        "epsilon": accounting.epsilon(sigma, q, count, chosen, accountant=accountant),
        "delta": chosen,
        "sampling_rate": q,
        "accountant": accounting.accountant_version(accountant),
    }
    if json:
        print_json(answer)
    else:
        console().print(facts(answer))
