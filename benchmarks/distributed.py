"""What several processes cost: the path itself, the throughput of two, and the plan's constants.

    python benchmarks/distributed.py [--width 0.25] [--batch-size 128] [--rounds 9] [--save]

overhead    One process, a step alone and a step over ranks by turns (a gloo group of one, with its
            messages and copies): the median of the ratios of neighbouring steps' CPU time,
            which is as rough as the machine is busy; and, from inside the step, the share of its
            CPU time that goes to the group's own work.
throughput  Two processes with one thread each. By turns they train apart (each its own oracle,
            noise and ledger, a batch of l each) and together (one oracle over two ranks, a batch of
            2 l). The ratio of samples a second, together over apart: by wall time, which also pays
            for waiting on the other rank's larger share, and by CPU time, which does not. Other
            work on the machine makes ranks wait for one another: hence the load is shown.
constants   Noise a coordinate, and the time of reduce-scatter and all-gather by size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dpbam import BAM, DPSGD, Compute, PrivacyPlan, PrivateGradientOracle
from dpbam.distributed import Ranks, joined
from dpbam.nn import build_model
from dpbam.privacy.secure_noise import make_noise

RESULTS = Path(__file__).parent / "results" / "distributed.json"
METHODS = {"dp-sgd": DPSGD, "bam": lambda: BAM(0.02)}
N = 50_000


def stepper(options: argparse.Namespace, ranks: Ranks, batch_size: int) -> Callable[[], None]:
    """A function that takes one training step on its share of a Poisson batch."""
    model = build_model(
        "resnet9", in_channels=3, image_size=32, num_classes=10, width=options.width, seed=0
    )
    plan = PrivacyPlan(n=N, batch_size=batch_size, steps=10**6, noise_multiplier=1.0, delta=1e-6)
    oracle = PrivateGradientOracle(
        model, nn.CrossEntropyLoss(reduction="none"), plan, METHODS[options.method](),
        compute=Compute(engine="fused", physical_batch_size=options.batch_size), ranks=ranks,
        sampling="poisson-elsewhere",
    )  # fmt: skip
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-4)
    images = torch.randn(1000, 3, 32, 32)
    sampler, share = plan.sampler(seed=0), ranks.share  # Poisson batches, of repeated images

    def step() -> None:
        units = sampler.indices(oracle.step)
        own = torch.from_numpy(units[share.owns(units)])
        ranks.sums(len(own), 0.0, 0.0)  # the trainer's word with the others at every step
        oracle.backward(images[own % 1000], own % 10, own)
        optimizer.step()

    return step


def timed(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Wall and CPU seconds of ``steps`` steps."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return time.perf_counter() - wall, time.process_time() - cpu


class Inside:
    """Adds up the CPU seconds that the group's messages take; the ledger's write is among them."""

    def __init__(self, ranks: Ranks) -> None:
        self.seconds = 0.0
        for name in ("sums", "scatter", "gather", "collect", "from_leader"):
            setattr(ranks, name, self._timed(getattr(ranks, name)))

    def _timed(self, message: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.process_time()
            found = message(*args)
            self.seconds += time.process_time() - began
            return found

        return timed


def overhead(options: argparse.Namespace, ranks: Ranks) -> dict[str, float]:
    """A step over a group of one against a step alone, and the group's own share of it."""
    inside = Inside(ranks)
    alone, grouped = (stepper(options, r, options.batch_size) for r in (Ranks(), ranks))
    alone(), grouped()
    ratios, seconds, shares = [], [], []
    for round_ in range(2 * options.rounds):
        pair = [alone, grouped] if round_ % 2 else [grouped, alone]
        inside.seconds = 0.0
        times = {step: timed(step, 1)[1] for step in pair}
        shares.append(inside.seconds / times[grouped])
        ratios.append(times[grouped] / times[alone])
        seconds.append(times[alone])
    return {"cpu_seconds_a_step": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "share_of_a_step": statistics.median(shares)}  # fmt: skip


def throughput(options: argparse.Namespace, ranks: Ranks) -> dict[str, float]:
    """Samples a second of the ranks together over those of each apart."""
    apart = stepper(options, Ranks(), options.batch_size)
    joint = stepper(options, ranks, ranks.world * options.batch_size)
    apart(), joint()
    wall, cpu = [], []
    for _ in range(options.rounds):
        dist.barrier()
        one = timed(apart, options.steps)
        rate = ranks.sums(1 / one[0])[0] / ranks.world  # steps a second and process
        two = timed(joint, options.steps)
        wall.append((1 / ranks.sums(two[0] / ranks.world)[0]) / rate)
        cpu.append(ranks.sums(one[1])[0] / ranks.sums(two[1])[0])
    return {"wall": statistics.median(wall), "cpu": statistics.median(cpu)}


def messages(ranks: Ranks) -> dict[str, float]:
    """Seconds of reduce-scatter and all-gather: latency, and seconds a byte (medians)."""
    found = {}
    for size in (1, 4_000_000):
        message, times = {"w": torch.ones(size)}, []
        for _ in range(15):
            dist.barrier()
            began = time.perf_counter()
            ranks.gathered(ranks.scattered(message)[0], message)
            times.append(time.perf_counter() - began)
        found[size] = statistics.median(times)
    return {"latency": found[1], "seconds_a_byte": (found[4_000_000] - found[1]) / 16e6}


def noise() -> dict[str, float]:
    """CPU seconds a coordinate."""
    found = {}
    for kind in ("standard", "secure"):
        maker, times = make_noise(kind, None), []
        sums = {"w": torch.zeros(10**6, dtype=torch.float64)}
        for step in range(5):
            began = time.process_time()
            maker.add(sums, 1.0, step)
            times.append(time.process_time() - began)
        found[kind] = min(times) / 10**6
    return found


def as_ranks(world: int, work: Callable[[Ranks], Any]) -> Any:
    """``work`` on ``world`` new processes; what rank 0 gives."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, world, port, work, answer))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found = answer.get()
    for process in processes:
        process.join()
    return found


def _rank(rank: int, world: int, port: int, work: Any, answer: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    torch.set_num_threads(1)
    function, *args = work
    with joined() as ranks:
        found = function(*args, ranks)
        if rank == 0:
            answer.put(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--batch-size", type=int, default=128, help="expected, of one process")
    parser.add_argument("--method", choices=METHODS, default="dp-sgd")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of a turn, for the throughput")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    report = {
        "settings": {k: v for k, v in vars(options).items() if k != "save"},
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
        "overhead_of_one": as_ranks(1, (overhead, options)),
        "throughput_of_two": as_ranks(2, (throughput, options)),
        "messages_of_two": as_ranks(2, (messages,)),
        "noise_seconds_a_coordinate": noise(),
        "load_after": os.getloadavg()[0],
    }
    print(json.dumps(report, indent=2))
    if options.save:
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
