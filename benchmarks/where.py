"""Where a step's time goes, operation by operation, in processor time on one thread.

    python benchmarks/where.py [--net resnet9-64] [--method bam-exact] [--batch 16] [--shapes]

Every operation below autograd is timed on its own; the least of three steps, so that a busy
machine disturbs little.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import defaultdict
from typing import Any

import torch
from steps import step
from torch.utils._python_dispatch import TorchDispatchMode


class Timer(TorchDispatchMode):
    def __init__(self, shapes: bool) -> None:
        super().__init__()
        self.shapes = shapes
        self.seconds: dict[Any, float] = defaultdict(float)
        self.calls: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.process_time()
        out = func(*args, **(kwargs or {}))
        key = str(func).removeprefix("aten.").removesuffix(".default")
        if self.shapes:
            key += " " + " ".join(str(tuple(a.shape)) for a in args[:3] if torch.is_tensor(a))
        self.seconds[key] += time.process_time() - begin
        self.calls[key] += 1
        return out


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", default="resnet9-64")
    parser.add_argument("--engine", default="fused")
    parser.add_argument("--method", default="bam-exact")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--lines", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = step(arguments.engine, arguments.method, arguments.net, arguments.batch)
    run()
    least: dict[Any, float] = {}
    for _ in range(3):
        with Timer(arguments.shapes) as timer:
            run()
        least = {k: min(v, least.get(k, v)) for k, v in timer.seconds.items()}
    print(f"{arguments.engine} {arguments.method}: {1e3 * sum(least.values()):.0f} ms")
    for key, seconds in sorted(least.items(), key=lambda item: -item[1])[: arguments.lines]:
        print(f"{1e3 * seconds:8.1f} ms {timer.calls[key]:5d}  {key}")


if __name__ == "__main__":
    main()
