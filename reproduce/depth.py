"""The paper's Figure 3: the time of a step against the depth of the network.

A net of ``depth`` convolutions of equal width (each with group norm and Mish) on small images, the
fused engine, one thread, processor time. Ten trials of five steps each, as in the paper, at smaller
depths. Trials of one number follow one another closely, so that they are pairs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dpbam.app.report.charts import Series, lines
from dpbam.app.report.figure import Figure
from dpbam.app.runs.files import write_json
from dpbam.estimates import Estimate, estimate
from reproduce.claims import Claim
from reproduce.outcome import Outcome, Study, TextTable
from reproduce.records import machine

if TYPE_CHECKING:
    from torch import nn

    from dpbam.methods import Method

NAMES = {"dp-sgd": "DP-SGD", "dp-sat": "DP-SAT", "bam": "BAM-SAM", "bam-exact": "BAM-FWD-REV"}
Step = Callable[[], None]
Clock = Callable[[], float]
K = TypeVar("K")
LINEAR = 1.1  # an exponent of the growth below this counts as linear


@dataclass(frozen=True)
class Timing:
    """What to time: numbers of convolutions, trials, steps per trial, channels, pixels, images."""

    depths: tuple[int, ...] = (4, 8, 16, 32)
    trials: int = 10
    repetitions: int = 5
    width: int = 32
    side: int = 8
    batch: int = 16


def measure(timing: Timing, path: Path) -> dict[str, Any]:
    """Time every method at every depth into ``path``, or read what is there.

    Returns:
        ``seconds[method][depth]``: one number per trial; ``settings``; ``machine``.
    """
    import torch

    if path.exists():
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return stored
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        by_depth = {depth: _at(depth, timing) for depth in timing.depths}
    finally:
        torch.set_num_threads(threads)
    seconds = {m: {str(d): by_depth[d][m] for d in timing.depths} for m in NAMES}
    result = {
        "settings": vars(timing),
        "seconds": seconds,
        "machine": machine(1, "cpu"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    return result


def _at(depth: int, timing: Timing) -> dict[str, list[float]]:
    steps = {name: private_step(depth, name, timing) for name in NAMES}
    return by_turns(steps, timing, time.process_time)


def by_turns(steps: Mapping[K, Step], timing: Timing, now: Clock) -> dict[K, list[float]]:
    """Measure the seconds per step, one number per trial.

    All steps take turns within a trial, so that a busy machine slows all of them.
    """
    seconds: dict[K, list[float]] = {key: [] for key in steps}
    for step in steps.values():
        step()  # what happens once happens now
    for _ in range(timing.trials):
        for key, step in steps.items():
            begin = now()
            for _ in range(timing.repetitions):
                step()
            seconds[key].append((now() - begin) / timing.repetitions)
    return seconds


def private_step(depth: int, name: str, timing: Timing, engine: str = "fused") -> Step:
    """Build one private gradient without its noise: directions, norms, clipped sum."""
    import torch
    from torch import nn

    from dpbam.engines import FunctionalEngine, FusedEngine, PhysicalBatch

    loss = nn.CrossEntropyLoss(reduction="none")
    kind = FusedEngine if engine == "fused" else FunctionalEngine
    engine_of_net = kind(_net(depth, timing.width), loss)
    method, lam = _methods()[name]
    n = torch.arange(timing.batch)
    images = torch.randn(timing.batch, 3, timing.side, timing.side)
    batch = PhysicalBatch(images, n % 10, timing.batch, n)

    def run() -> None:
        handle = engine_of_net.directions(batch, method, lam)
        handle.weighted_sum(handle.norms().reciprocal().clamp(max=1.0))

    return run


def _net(depth: int, width: int) -> nn.Module:
    import torch
    from torch import nn

    from dpbam.nn import StandardisedConv2d

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k in range(depth):
        channels = 3 if k == 0 else width
        convolution = StandardisedConv2d(channels, width, 3, padding=1, bias=False, scale=False)
        layers += [convolution, nn.GroupNorm(width // 2, width), nn.Mish()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def _methods() -> dict[str, tuple[Method, float]]:
    from dpbam.methods import BAM, DPSAT, DPSGD

    return {
        "dp-sgd": (DPSGD(), 0.0),
        "dp-sat": (DPSAT(0.02), 0.02),
        "bam": (BAM(0.02), 0.02),
        "bam-exact": (BAM(0.02, exact=True), 0.02),
    }


def figure3(result: Mapping[str, Any], studies: Sequence[Study] = ()) -> Outcome:
    """Compare the times of the methods and their growth with depth."""
    seconds: Mapping[str, Mapping[str, list[float]]] = result["seconds"]
    depths = [int(depth) for depth in seconds["dp-sgd"]]
    claims = []
    for bam in ("bam", "bam-exact"):
        for other in ("dp-sgd", "dp-sat"):
            text = f"{NAMES[bam]} takes longer than {NAMES[other]} (ln of the ratio)"
            ratio = _log_ratio(seconds[bam], seconds[other])
            papers = other == "dp-sgd"
            claims.append(Claim(text, "above", ratio, over="trials", paper="Figure 3" * papers,
                                headline=text * papers))  # fmt: skip
        growth = _exponents(seconds[bam])
        shown = estimate([value - LINEAR for value in growth])
        text = f"{NAMES[bam]} grows at most linearly: its exponent of the depth is below {LINEAR:g}"
        claims.append(Claim(text, "below", shown, over="trials", paper="Figure 3", headline=text))
    return Outcome(
        "fig3", "Figure 3: time of a step against depth",
        tables=[_table(seconds, depths)],
        figures=[_figure(seconds, depths)],
        claims=claims,
        notes=["Processor time, fused engine, one thread: see the settings in the record. DP-SAT's "
               "shift of the parameters, one addition per parameter, is not timed."],
        seconds=sum(sum(t) for by in seconds.values() for t in by.values())
        * result["settings"]["repetitions"],
        machine=result["machine"],
        studies=studies,
    )  # fmt: skip


def _log_ratio(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> Estimate:
    """Mean over the depths of ln(one / other), one number per trial, then over the trials."""
    mine, its = (np.log(list(by.values())).mean(axis=0) for by in (one, other))
    return estimate([float(ratio) for ratio in mine - its])


def _exponents(by_depth: Mapping[str, list[float]]) -> list[float]:
    """p of time = c depth^p, by least squares in the logarithms, one per trial."""
    depths = [int(depth) for depth in by_depth]
    slopes = np.polyfit(np.log(depths), np.log(list(by_depth.values())), 1)[0]
    return [float(slope) for slope in slopes]


def _table(seconds: Mapping[str, Mapping[str, list[float]]], depths: Sequence[int]) -> TextTable:
    rows = []
    for method, by_depth in seconds.items():
        means = [estimate(by_depth[str(depth)]) for depth in depths]
        cells = [f"{1e3 * e.mean:.1f} ± {1e3 * e.deviation:.1f}" for e in means]
        growth = estimate(_exponents(by_depth))
        rows.append((NAMES[method], *cells, f"{growth.mean:.2f}"))
    header = ("ms per step", *(f"{depth} layers" for depth in depths), "exponent of depth")
    return TextTable(header, rows)


def _figure(seconds: Mapping[str, Mapping[str, list[float]]], depths: Sequence[int]) -> Figure:
    series = []
    for colour, (method, by_depth) in enumerate(seconds.items()):
        means = [estimate(by_depth[str(depth)]) for depth in depths]
        series.append(Series(
            NAMES[method], colour, tuple(float(d) for d in depths),
            tuple(1e3 * e.mean for e in means), tuple(1e3 * e.low for e in means),
            tuple(1e3 * e.high for e in means), style="points",
        ))  # fmt: skip
    panel = lines("", "convolutions", "milliseconds per step", series, zero=True)
    caption = "Processor time of a step against depth, mean and 95% t interval over the trials."
    return Figure("fig3", "Time of a step against depth", caption, "public", [panel])
