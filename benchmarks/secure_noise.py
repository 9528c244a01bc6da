"""What noise costs: standard, secure and torch.randn, and as a share of a BAM step on ResNet-9.

    python benchmarks/secure_noise.py                   (a whole batch of 512: some minutes)
    python benchmarks/secure_noise.py --rows 32         (scaled up: a step is linear in its rows)

Each figure is the least of the repeats, of processor seconds, so that other work on the machine
counts little; the kinds of noise take turns. torch.randn only draws, and adds to nothing. The share
asked for is at most 10%. Figures go to ``results/secure_noise.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import nn

from dpbam import BAM, Compute, PrivacyPlan, PrivateGradientOracle
from dpbam.nn import build_model
from dpbam.privacy.secure_noise import make_noise

BATCH = 512
RESULTS = Path(__file__).with_name("results") / "secure_noise.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=BATCH)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build_model("resnet9", in_channels=3, image_size=32, num_classes=10, seed=0)
    sums = {n: torch.randn_like(p, dtype=torch.float64) for n, p in model.named_parameters()}
    count = sum(s.numel() for s in sums.values())
    kinds = {
        "standard": lambda: make_noise("standard", None).add(sums, 1.0, 0),
        "secure": lambda: make_noise("secure", None).add(sums, 1.0, 0),
        "torch.randn, float64": lambda: torch.randn(count, dtype=torch.float64),
        "torch.randn, float32": lambda: torch.randn(count),
    }
    noise = dict.fromkeys(kinds, math.inf)
    for kind in options.repeats * list(kinds):
        noise[kind] = min(noise[kind], _least(kinds[kind], 1))
    step = _step(model, options) * BATCH / options.rows
    print(f"ResNet-9, {count:,} parameters, {options.threads} thread(s), processor seconds")
    print(f"BAM step at batch {BATCH}: {step:.1f} s"
          + (f" (scaled up from {options.rows})" if options.rows != BATCH else ""))  # fmt: skip
    for kind, seconds in noise.items():
        print(f"{kind}: {seconds:.3f} s, {1e9 * seconds / count:.1f} ns per coordinate, "
              f"{seconds / step:.2%} of the step")  # fmt: skip
    figures = {
        "parameters": count, "threads": options.threads, "rows": options.rows, "batch": BATCH,
        "BAM step, processor seconds": step, "noise, processor seconds": noise,
        "share of the step": {kind: seconds / step for kind, seconds in noise.items()},
        "command": f"python benchmarks/secure_noise.py --rows {options.rows}",
    }  # fmt: skip
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


def _step(model: nn.Module, options: argparse.Namespace) -> float:
    plan = PrivacyPlan(n=50_000, batch_size=BATCH, steps=10, noise_multiplier=1.0, delta=1e-5)
    oracle = PrivateGradientOracle(
        model, nn.CrossEntropyLoss(reduction="none"), plan, BAM(0.02),
        compute=Compute(physical_batch_size=min(32, options.rows)), sampling="unchecked",
    )  # fmt: skip
    x, y = torch.randn(options.rows, 3, 32, 32), torch.randint(10, (options.rows,))
    return _least(lambda: oracle.backward(x, y), 1 if options.rows == BATCH else options.repeats)


def _least(work, repeats: int) -> float:
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


if __name__ == "__main__":
    main()
