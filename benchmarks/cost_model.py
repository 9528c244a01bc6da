"""The cost model against the clock: for each layer, was the way it chose the faster one?

A net of one layer is timed with its norm by Gram matrices, and with its gradients formed, taking
turns; once for DP-SGD, once for exact BAM, where the norm is differentiated. ``lost`` is the time
of the way that the model chose over that of the faster one.

    python benchmarks/cost_model.py [--repeats 5] [--batch 16] [--out results]

Processor time on one thread. Writes results/cost_model.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from steps import METHODS
from torch import Tensor, nn

from dpbam.engines import FusedEngine, PhysicalBatch
from dpbam.engines.fused.layers.conv import Conv
from dpbam.engines.fused.layers.linear import Linear

HERE = Path(__file__).parent
#: (in channels, out channels, side, stride): ResNet-9's and WideResNet-16-4's 3x3 convolutions.
CONVOLUTIONS = (
    (3, 64, 32, 1), (64, 128, 32, 1), (128, 128, 16, 1), (128, 256, 16, 1), (256, 256, 8, 1),
    (256, 256, 4, 1), (16, 64, 32, 1), (64, 64, 32, 1), (64, 128, 32, 2), (16, 16, 32, 1),
    (32, 32, 16, 1), (64, 64, 8, 1),
)  # fmt: skip
#: (positions, in, out): a small ViT's, a transformer's, a head's.
MATRICES = ((65, 128, 384), (65, 128, 512), (65, 512, 128), (16, 256, 256), (256, 64, 64),
            (1, 1024, 10), (512, 32, 32))  # fmt: skip


class Summed(nn.Module):
    """One layer whose input has a gradient, as inside a net, and a loss with a curvature."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x * self.scale)).flatten(1).sum(1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def layers() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    found: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}
    for i, o, side, stride in CONVOLUTIONS:
        conv = nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False)
        found[f"conv {i}-{o}, {side}x{side}, stride {stride}"] = conv, (i, side, side)
    for t, i, o in MATRICES:
        found[f"linear {i}-{o}, {t} positions"] = nn.Linear(i, o, bias=False), (t, i)
    return found


def timed(layer: nn.Module, shape: tuple[int, ...], method: str, options: Any) -> dict[str, Any]:
    """Seconds with the Gram way and with the other, the best of several turns; and the choice."""
    n = torch.arange(options.batch)
    x, y = torch.randn(options.batch, *shape), torch.zeros(options.batch)
    batch = PhysicalBatch(x, y, options.batch, n)
    what, lam = METHODS[method]
    chosen: list[bool] = []

    def run(ghost: bool | None) -> float:
        engine = FusedEngine(Summed(layer, shape), loss)
        kind = Conv if isinstance(layer, nn.Conv2d) else Linear
        own = kind.prefers_gram

        def prefers(self: Any, t: int, pairs: int, purpose: Any) -> bool:
            chosen.append(own(self, t, pairs, purpose))
            return chosen[-1] if ghost is None else ghost

        with mock.patch.object(kind, "prefers_gram", prefers):
            begin = time.process_time()
            handle = engine.directions(batch, what, lam)
            handle.weighted_sum(handle.norms().reciprocal().clamp(max=1.0))
            return time.process_time() - begin

    run(None)
    choice = chosen[0]
    best = {True: float("inf"), False: float("inf")}
    for _ in range(options.repeats):
        for way in best:
            best[way] = min(best[way], run(way))
    return {"ghost": best[True], "formed": best[False], "chosen": "ghost" if choice else "formed",
            "lost": best[choice] / min(best.values())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (layer, shape) in layers().items():
        for method in ("dp-sgd", "bam-exact"):
            row = {"layer": name, "method": method, **timed(layer, shape, method, options)}
            rows.append(row)
            print(f"{name:32} {method:10} ghost {1e3 * row['ghost']:8.1f} ms, formed "
                  f"{1e3 * row['formed']:8.1f} ms: {row['chosen']:6} lost {row['lost']:.2f}",
                  flush=True)  # fmt: skip
    worst = max(rows, key=lambda row: row["lost"])
    right = sum(row["lost"] == 1.0 for row in rows)
    print(f"the faster way in {right} of {len(rows)}; at worst {worst['lost']:.2f} times as long "
          f"({worst['layer']}, {worst['method']})")  # fmt: skip
    facts = {"repeats": options.repeats, "batch": options.batch, "torch": torch.__version__}
    options.out.mkdir(exist_ok=True, parents=True)
    (options.out / "cost_model.json").write_text(
        json.dumps({**facts, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
