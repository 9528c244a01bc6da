"""The table of docs/engine.md on a GPU: one command for a machine that has one.

    python benchmarks/gpu.py [--device cuda] [--nets resnet9 vit] [--rounds 20] [--scale 8]

For each net it checks that the fused engine's norms and clipped sums on the device agree with those
on the processor, and times whole private steps, noise included, in turns with the plain step and
with Opacus where it is installed. Times are of the clock, with the device synchronised around each
step; ``--scale`` multiplies the rows of the benchmark's nets, which are chosen for one thread of a
processor. Kernels and host reads are counted next to them (``kernels.py``).

The output is a Markdown table with the device's name, to paste into docs/engine.md, and one line
per net that disagrees. Exit code: 1 if one does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from kernels import counted
from nets import NETS, loss, make
from steps import METHODS, opacus_step, placed, private_step, step

from dpbam.batches import LogicalBatch, Views
from dpbam.engines import FusedEngine

PRIVATE = ("dp-sgd", "bam", "bam-exact")
OPACUS = ("hooks", "functorch", "ghost")
NETS_OF_TABLE = ("convolutions", "resnet9", "resnet18", "vit", "gpt2", "unet", "lstm", "mobilenet",
                 "bert", "pointnet", "lora-large", "mlp-large")  # fmt: skip
CLOSE = 2e-3  # relative: the device adds float32 numbers in another order


def difference(net: str, device: torch.device, rows: int = 8) -> float:
    """Return the largest relative difference of norms and clipped sums to the processor's.

    Of a norm to that norm, of the sum to the length of the sum.
    """
    largest = 0.0
    for method in PRIVATE:
        norms, total = _directions(net, method, rows, torch.device("cpu"))
        other_norms, other_total = _directions(net, method, rows, device)
        by_norm = float(((norms - other_norms).abs() / norms).max())
        by_sum = float((total - other_total).norm() / total.norm())
        largest = max(largest, by_norm, by_sum)
    return largest


def _directions(
    net: str, method: str, rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms [U] and the clipped sum as one vector, in float64 on the processor."""
    model, x, y = placed(make(net, rows), device)
    (batch,) = LogicalBatch.of(x, y, None, 1).split(rows, Views(), device)
    what, lam = METHODS[method]
    directions = FusedEngine(model, loss).directions(batch, what, lam)
    norms = directions.norms()
    total = directions.weighted_sum(norms.reciprocal().clamp(max=1.0))
    vector = torch.cat([total[name].flatten().cpu().double() for name in sorted(total)])
    return norms[0].cpu().double(), vector


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of a step by the clock, with nothing left in the device's queue."""
    _synchronise(device)
    begin = time.perf_counter()
    run()
    _synchronise(device)
    return time.perf_counter() - begin


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def steps_of(net: str, rows: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the steps that run on this device, each after a first call."""
    candidates: dict[str, Callable[[], Callable[[], object]]] = {
        "plain": lambda: step("plain", "sgd", net, rows, device=device),
    }
    for method in PRIVATE:
        candidates[method] = lambda method=method: private_step(
            "fused", method, net, rows, device=device
        )
    for mode in OPACUS:
        candidates[f"opacus {mode}"] = lambda mode=mode: opacus_step(
            mode, *placed(make(net, rows), device), noise=1.0
        )
    runs = {}
    for name, prepare in candidates.items():
        try:
            run = prepare()
            run()
        except Exception as error:
            print(f"  {net}: {name}: {type(error).__name__}: {str(error)[:90]}", file=sys.stderr)
        else:
            runs[name] = run
    return runs


def row_of(net: str, options: argparse.Namespace) -> tuple[str, float]:
    """Return a net's row of the table, and its difference to the processor."""
    device, rows = options.device, NETS[net].batch * options.scale
    runs = steps_of(net, rows, device)
    turns = [{k: seconds(run, device) for k, run in runs.items()} for _ in range(options.rounds)]
    ratio = {k: statistics.median(turn[k] / turn["plain"] for turn in turns) for k in runs}
    plain = 1e3 * statistics.median(turn["plain"] for turn in turns)
    kernels = counted(runs["plain"], private=False).kernels
    cells = [net, str(rows), f"{plain:.2f} ms"]
    for method in PRIVATE:
        if method not in runs:
            cells.append("-")
            continue
        count = counted(runs[method])
        cells.append(f"{ratio[method]:.2f} ({count.kernels / kernels:.1f}, {count.reads})")
    rivals = {k: t for k, t in ratio.items() if k.startswith("opacus")}
    best = min(rivals, key=rivals.__getitem__, default=None)
    cells.append("-" if best is None else f"{rivals[best]:.2f} ({best.split()[1]})")
    apart = difference(net, device)
    cells.append(f"{apart:.0e}")
    return "| " + " | ".join(cells) + " |", apart


def device_name(device: torch.device) -> str:
    """Return what to call the device in the table."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def main(arguments: list[str] | None = None) -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    accelerator = torch.accelerator.current_accelerator()
    default = torch.device("cpu") if accelerator is None else accelerator
    parser.add_argument("--device", type=torch.device, default=default)
    parser.add_argument("--nets", nargs="+", default=NETS_OF_TABLE, choices=tuple(NETS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--scale", type=int, default=None, help="8 on a GPU, 1 on a processor")
    options = parser.parse_args(arguments)
    if options.scale is None:
        options.scale = 1 if options.device.type == "cpu" else 8
    print(f"{device_name(options.device)}; torch {torch.__version__}; whole steps with noise, as "
          "multiples of the plain step (kernels over plain, host reads)\n")  # fmt: skip
    titles = ["net", "rows", "plain", *PRIVATE, "fastest Opacus", "difference to the processor"]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    apart = []
    for net in options.nets:
        row, differs = row_of(net, options)
        print(row, flush=True)
        if not differs < CLOSE:
            apart.append(f"{net} differs from the processor by {differs:.1e}, more than {CLOSE:g}")
    print("", *apart, sep="\n")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
