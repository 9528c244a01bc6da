"""What measuring the bias at every step costs, as a share of the training step (fused engine).

    python benchmarks/bias_overhead.py [--width 0.25] [--side 32] [--batch-size 128] [--rounds 15]

A step is the oracle's backward and the optimiser's step, at one physical batch. Steps with and
without the lens take turns, so that other load on the machine hits both; the figures are medians of
CPU time (``--clock wall`` for wall time). Options of the lens are measured apart: ``layers`` adds
each layer's norms and bias; ``eta`` takes a from the eta_i; ``plain`` is DP-SAT's further pass.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from dpbam import BAM, DPSAT, DPSGD, Compute, Method, PrivacyPlan, PrivateGradientOracle
from dpbam.bias import BiasLens
from dpbam.nn import build_model

METHODS = {
    "dp-sgd": DPSGD,
    "dp-sat": lambda: DPSAT(0.086),
    "bam": lambda: BAM(0.02),
    "bam (exact)": lambda: BAM(0.02, exact=True),
}
LENSES: dict[str, Callable[[], BiasLens | None]] = {
    "no lens": lambda: None,
    "lens": lambda: BiasLens(layers=False),
    "lens with layers": lambda: BiasLens(),
    "lens with layers and eta": lambda: BiasLens(eta=True),
    "lens with layers and plain": lambda: BiasLens(plain=True),
}


def stepper(
    options: argparse.Namespace, method: Method, lens: BiasLens | None
) -> Callable[[], None]:
    torch.manual_seed(0)
    side, size = options.side, options.batch_size
    model = build_model(
        "resnet9", in_channels=3, image_size=side, num_classes=10, width=options.width, seed=0
    )
    plan = PrivacyPlan(n=50_000, batch_size=size, steps=10_000, noise_multiplier=1.0, delta=1e-5)
    loss = nn.CrossEntropyLoss(reduction="none")
    oracle = PrivateGradientOracle(
        model, loss, plan, method, sampling="unchecked", observers=lens,
        compute=Compute(engine="fused", physical_batch_size=size),
    )  # fmt: skip
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-4)
    x, y = torch.randn(size, 3, side, side), torch.randint(0, 10, (size,))

    def step() -> None:
        oracle.backward(x, y)
        optimizer.step()
        if lens:
            lens.records.clear()

    return step


def measure(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Median seconds a step by lens."""
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    steps = {key: stepper(options, METHODS[name](), make()) for key, make in LENSES.items()}
    times: dict[str, list[float]] = {key: [] for key in steps}
    for round_ in range(options.rounds + 2):
        for key, step in steps.items():
            began = clock()
            step()
            if round_ >= 2:  # the first ones look at the model, and have no previous gradient
                times[key].append(clock() - began)
    return {key: statistics.median(values) for key, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in METHODS:
        found = measure(options, name)
        base = found["no lens"]
        report = {
            key: round(value / base - 1, 3) for key, value in found.items() if key != "no lens"
        }
        print(
            json.dumps({"method": name, "milliseconds": round(base * 1e3, 1), "overhead": report})
        )


if __name__ == "__main__":
    main()
