"""``dpbam epsilon``: what a training costs."""

from __future__ import annotations

from typing import Annotated

import typer

from dpbam.app.cli import mechanism
from dpbam.app.cli.output import console, examples, facts, print_json

EXAMPLES = examples(
    "dpbam epsilon --noise-multiplier 1.731 --n 50000 --batch-size 4096 --steps 1000 --delta 1e-5",
    "dpbam epsilon --noise-multiplier 1 --sampling-rate 0.01 --steps 500 --delta 1e-5 --json",
)


def run(
    noise_multiplier: Annotated[float, typer.Option(help="Sigma.")],
    n: mechanism.N = None,
    batch_size: mechanism.BatchSize = None,
    sampling_rate: mechanism.SamplingRate = None,
    epochs: mechanism.Epochs = None,
    steps: mechanism.Steps = None,
    delta: mechanism.Delta = None,
    accountant: mechanism.Accountant = "pld",
    json: mechanism.Json = False,
) -> None:
    """Calculate the epsilon of a training with a given noise multiplier.

    The same for DP-SGD, DP-SAT and BAM: they cost the same.
    """
    from dpbam.privacy import accounting

    q = mechanism.sampling_rate(n, batch_size, sampling_rate)
    count = mechanism.steps(epochs, steps, q)
    chosen = mechanism.delta(delta, n)
    spent = accounting.epsilon(noise_multiplier, q, count, chosen, accountant=accountant)
    answer = {
        "epsilon": spent,
        "delta": chosen,
        "noise_multiplier": noise_multiplier,
        "sampling_rate": q,
        "steps": count,
        "accountant": accounting.accountant_version(accountant),
    }
    if json:
        print_json(answer)
    else:
        console().print(facts(answer))
