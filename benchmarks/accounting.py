"""What accounting costs: a ledger's epsilon, and the calibration of the README's plans.

    python benchmarks/accounting.py

Processor seconds. "cold" is the first epsilon of a process, "new steps" the median of five after
one more step each, "unchanged" a call after nothing was added. Next to them is dp-accounting's own
composition of the same steps, and the difference of the two epsilons.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import dp_accounting
from dp_accounting.pld import privacy_loss_distribution

from dpbam import PrivacyPlan
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import default_delta

LEDGERS = ((1.731, 4096 / 50_000, 1000, 1e-5), (0.6, 0.02, 150, 1e-5), (1.0, 0.01, 10_000, 1e-6))
PLANS = {
    "the first example": {"epsilon": 3, "delta": 1e-4, "n": 500, "batch_size": 50, "epochs": 3},
    "CIFAR-10": {"epsilon": 8, "delta": 1e-5, "n": 50_000, "batch_size": 1000, "epochs": 3},
    "PneumoniaMNIST": {
        "epsilon": 8,
        "delta": default_delta(4708),
        "n": 4708,
        "batch_size": 512,
        "epochs": 10,
    },
}


def seconds(work: Callable[[], float]) -> tuple[float, float]:
    began = time.process_time()
    value = work()
    return time.process_time() - began, value


def peer(sigma: float, q: float, steps: int, delta: float) -> tuple[float, float]:
    """Seconds and epsilon of dp-accounting, without the discretisation of a step."""
    step = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=sigma,
        sampling_prob=q,
        value_discretization_interval=1e-4,
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    return seconds(lambda: step.self_compose(steps).get_epsilon_for_delta(delta))


def main() -> None:
    print("| sigma | q | steps | cold | new steps | unchanged | dp-accounting | difference |")
    print("|" + "---:|" * 8)
    for sigma, q, steps, delta in LEDGERS:
        ledger = Ledger(delta)

        def charge(step: int, ledger: Ledger = ledger, sigma: float = sigma, q: float = q) -> None:
            ledger.charge("s", step, noise_multiplier=sigma, sampling_rate=q)

        for step in range(steps):
            charge(step)
        cold, found = seconds(ledger.epsilon)
        theirs, expected = peer(sigma, q, steps, delta)
        new = []
        for step in range(steps, steps + 5):
            charge(step)
            new.append(seconds(ledger.epsilon)[0])
        same, _ = seconds(ledger.epsilon)
        print(f"| {sigma:g} | {q:g} | {steps} | {cold:.2f} s | {statistics.median(new):.2f} s | "
              f"{1e3 * same:.2f} ms | {theirs:.2f} s | {found - expected:.0e} |")  # fmt: skip
    print("\n| calibration of | seconds | epsilon over target |\n|---|---:|---:|")
    for name, plan in PLANS.items():
        spent, over = seconds(lambda p=plan: PrivacyPlan.calibrate(**p).epsilon() - p["epsilon"])
        print(f"| {name} | {spent:.2f} | {over:.1e} |")


if __name__ == "__main__":
    main()
