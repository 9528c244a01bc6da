"""What accounting costs: a ledger's epsilon, and the calibration of the README's plans.

    python benchmarks/accounting.py

Processor seconds. "cold" is the first epsilon of a process, "new steps" the median of five after
one more step each, "unchanged" a call after nothing was added. A calibration is next to one whose
steps are composed as by FFT in a few lines of NumPy (:func:`fft_epsilon`), run in turn: what
dp-accounting's public composition costs in place of code of one's own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from scipy import fft
from scipy.signal import fftconvolve

from dpbam import PrivacyPlan
from dpbam.privacy import accounting
from dpbam.privacy.accounting import Charge
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import default_delta

LEDGERS = ((1.731, 4096 / 50_000, 1000, 1e-5), (0.6, 0.02, 150, 1e-5), (1.0, 0.01, 10_000, 1e-6))
PLANS = {
    "the first example": {"epsilon": 3, "delta": 1e-4, "n": 500, "batch_size": 50, "epochs": 3},
    "CIFAR-10": {"epsilon": 8, "delta": 1e-5, "n": 50_000, "batch_size": 1000, "epochs": 3},
    "the paper's": {"epsilon": 1, "delta": 1e-5, "n": 50_000, "batch_size": 4096, "steps": 1000},
    "four phases": {
        "epsilon": 3,
        "delta": 1e-5,
        "n": 50_000,
        "batch_size": 512,
        "steps": 500,
        "noise_schedule": (1.5, 1.2, 1.0, 0.8),
    },
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


def fft_epsilon(spent: Sequence[Charge], delta: float, grid: float) -> float:
    """Return epsilon of charges whose steps are composed by F^-1(F(p)^T), without private bounds.

    The least that a composition by Fourier transforms can cost; its windows are not proven.
    """
    values = []
    for side in ("_pmf_remove", "_pmf_add"):
        lower, total = 0, np.ones(1)
        for sigma, q, steps in spent:
            pmf = getattr(accounting._step_loss(sigma, q, grid), side).to_dense_pmf()
            probs, k = pmf._probs, np.arange(pmf.size)
            mean = k @ probs
            width = steps * (mean + 1) if steps < 50 else 0
            spread = 12 * math.sqrt(steps * ((k - mean) ** 2 @ probs)) + len(k)
            first = max(0, math.floor(steps * mean - spread - width))
            last = min(steps * (len(k) - 1), math.ceil(steps * mean + spread + width))
            size = fft.next_fast_len(max(last - first + 1, len(k)), real=True)
            cyclic = fft.irfft(fft.rfft(probs, size) ** steps, size)
            lower += steps * pmf._lower_loss + first
            total = fftconvolve(total, np.roll(cyclic, -first)[: last - first + 1])
        losses = (lower + np.arange(len(total)))[::-1] * grid
        upper = np.cumsum(total[::-1])
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            at = np.log((upper - delta) / np.cumsum(np.exp(-losses) * total[::-1]))
        enough = np.append((upper > delta)[:-1] & (at[:-1] >= losses[1:]), True)
        values.append(float(at[int(np.argmax(enough))]))
    return max(0.0, *values)


@contextmanager
def composed_by_fft() -> Iterator[None]:
    """Let the accountant compose by :func:`fft_epsilon`."""

    class Composed(NamedTuple):
        spent: tuple[Charge, ...]
        grid: float

        def get_epsilon_for_delta(self, delta: float) -> float:
            return fft_epsilon(self.spent, delta, self.grid)

    before = accounting._compose
    accounting._compose = Composed  # type: ignore[assignment]
    try:
        yield
    finally:
        accounting._compose = before


def calibrate(plan: dict[str, Any]) -> float:
    """Return the noise multiplier of a plan, as in a new process."""
    for cached in (accounting._on_grid, accounting._step_loss):
        cached.cache_clear()
    if hasattr(accounting._compose, "cache_clear"):
        accounting._compose.cache_clear()
    return PrivacyPlan.calibrate(**plan).noise_multiplier


def main() -> None:
    print("| sigma | q | steps | cold | new steps | unchanged |")
    print("|" + "---:|" * 6)
    for sigma, q, steps, delta in LEDGERS:
        ledger = Ledger(delta)

        def charge(step: int, ledger: Ledger = ledger, sigma: float = sigma, q: float = q) -> None:
            ledger.charge("s", step, noise_multiplier=sigma, sampling_rate=q)

        for step in range(steps):
            charge(step)
        cold, _ = seconds(ledger.epsilon)
        new = []
        for step in range(steps, steps + 5):
            charge(step)
            new.append(seconds(ledger.epsilon)[0])
        same, _ = seconds(ledger.epsilon)
        print(f"| {sigma:g} | {q:g} | {steps} | {cold:.2f} s | {statistics.median(new):.2f} s | "
              f"{1e3 * same:.2f} ms |")  # fmt: skip
    print("\n| calibration of | seconds | by FFT alone | ratio | sigma apart |")
    print("|---|" + "---:|" * 4)
    for name, plan in PLANS.items():
        times: dict[str, list[float]] = {"public": [], "fft": []}
        for _ in range(3):
            spent, public_sigma = seconds(lambda p=plan: calibrate(p))
            times["public"].append(spent)
            with composed_by_fft():
                spent, fft_sigma = seconds(lambda p=plan: calibrate(p))
            times["fft"].append(spent)
        public, by_fft = min(times["public"]), min(times["fft"])
        print(f"| {name} | {public:.2f} | {by_fft:.2f} | {public / by_fft:.2f} | "
              f"{fft_sigma / public_sigma - 1:.0e} |")  # fmt: skip


if __name__ == "__main__":
    main()
