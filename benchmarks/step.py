"""Time and memory of one step, engine by engine, as multiples of the non-private step.

Times: all engines take turns in one process, so that they share the machine's moods; the best of
several; the ratio to the non-private step of the same net. Memory: the growth of the peak resident
size from a small batch to a larger one, each measured in a process of its own.

    python benchmarks/step.py [--nets resnet9-64 vit] [--repeats 5] [--clock cpu] [--jax PYTHON]

``--clock cpu`` with ``--threads 1`` counts processor time, which other programs on the machine
disturb less. ``--jax`` names a Python that has jax; without it those rows are left out. Writes
results/step.json and results/step.png.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from steps import step

from dpbam.app.report.charts import quantity, text
from dpbam.app.report.figure import Figure, Panel

HERE = Path(__file__).parent
OURS = [("fused", m) for m in ("dp-sgd", "dp-sat", "bam", "bam-exact")]
FUNCTIONAL = [("functional", m) for m in ("dp-sgd", "bam", "bam-exact")]
OPACUS = [(f"opacus-{mode}", "dp-sgd") for mode in ("hooks", "functorch", "ew", "ghost")]
BATCH = {"resnet9-16": 64, "resnet9-64": 32, "resnet9-64-plain": 32, "wrn-16-4": 16, "vit": 32}
MEMORY_BATCHES = (8, 24)


def engines() -> list[tuple[str, str]]:
    return [("non-private", "sgd"), *OURS, *FUNCTIONAL, *OPACUS]


def times(net: str, repeats: int, clock: str) -> dict[tuple[str, str], float]:
    """The best of several turns, seconds."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    steps = {}
    for engine, method in engines():
        try:
            made = step(engine, method, net, BATCH[net])
            made()
            steps[engine, method] = made
        except Exception as error:  # an engine that cannot run this net has no row
            print(f"  {engine} {method} on {net}: {type(error).__name__}: {str(error)[:90]}")
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(repeats):
        for key, run in steps.items():
            if turn > 1 and key[0] == "functional" and key[1] == "bam-exact":
                continue  # ten times the others: two turns are enough
            begin = now()
            run()
            best[key] = min(best[key], now() - begin)
    return best


def memory(engine: str, method: str, net: str) -> float | None:
    """MB a sample: the growth of the peak resident size."""
    peaks = []
    for batch in MEMORY_BATCHES:
        command = [sys.executable, __file__, "--one", engine, method, net, str(batch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return None
        peaks.append(float(done.stdout.split()[-1]))
    return (peaks[1] - peaks[0]) / (MEMORY_BATCHES[1] - MEMORY_BATCHES[0]) / 1e6


def one(engine: str, method: str, net: str, batch: int) -> None:
    """A process of its own: the peak of a step, in bytes."""
    torch.set_num_threads(1)
    step(engine, method, net, batch)()
    status = Path("/proc/self/status").read_text()  # ru_maxrss would inherit the parent's peak
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024)


def jax_rows(python: str, net: str, arguments: argparse.Namespace, unit: float) -> list[Any]:
    command = [
        python, str(HERE / "jax_step.py"), "--width", "1.0" if "64" in net else "0.25",
        "--batch", str(BATCH[net]), "--repeats", str(arguments.repeats), "--clock", arguments.clock,
        "--threads", str(arguments.threads),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  jax on {net}: {done.stderr.strip().splitlines()[-1][:100]}")
        return []
    return [row("jax-vmap", m, net, s / unit, s, None) for m, s in json.loads(done.stdout).items()]


def row(
    engine: str, method: str, net: str, ratio: float, seconds: float, mb: float | None
) -> dict[str, Any]:
    return {
        "engine": engine, "method": method, "net": net, "ratio": round(ratio, 3),
        "seconds": round(seconds, 4), "mb_per_sample": None if mb is None else round(mb, 2),
    }  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(BATCH))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--jax", metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        engine, method, net, batch = arguments.one
        return one(engine, method, net, int(batch))
    torch.set_num_threads(arguments.threads)
    rows = []
    for net in arguments.nets:
        found = times(net, arguments.repeats, arguments.clock)
        unit = found["non-private", "sgd"]
        for (engine, method), seconds in found.items():
            mb = None if arguments.no_memory else memory(engine, method, net)
            rows.append(row(engine, method, net, seconds / unit, seconds, mb))
            show(rows[-1])
        if arguments.jax and net in ("resnet9-16", "resnet9-64"):
            rows += jax_rows(arguments.jax, net, arguments, unit)
            for each in rows[-2:]:
                show(each)
        save(rows, arguments)


def show(each: dict[str, Any]) -> None:
    mb = "" if each["mb_per_sample"] is None else f"{each['mb_per_sample']:8.2f} MB/sample"
    print(
        f"{each['net']:17} {each['engine']:17} {each['method']:10} {each['ratio']:7.2f} {mb}",
        flush=True,
    )


def save(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(exist_ok=True, parents=True)
    facts = {
        "torch": torch.__version__, "machine": platform.machine(), "threads": arguments.threads,
        "clock": arguments.clock, "repeats": arguments.repeats, "batch": BATCH,
        "memory_batches": MEMORY_BATCHES,
    }  # fmt: skip
    path = arguments.out / "step.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {r["net"] for r in rows}
    rows = [r for r in before if r["net"] not in done] + rows  # nets may be run one by one
    path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    plot(rows, arguments.out / "step.png")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    private = [r for r in rows if r["engine"] != "non-private"]
    nets = dict.fromkeys(r["net"] for r in rows)
    panels = [bars(net, [r for r in private if r["net"] == net]) for net in nets]
    Figure("step", "Time of a private step", "", "public", panels).save(path)


def bars(net: str, mine: list[dict[str, Any]]) -> Panel:
    rows = [{"name": f"{r['engine']} {r['method']}", "ratio": r["ratio"], "engine": r["engine"]}
            for r in mine]  # fmt: skip
    scale = {"type": "log", "nice": False}
    ratio = quantity("ratio", title="times the non-private step", scale=scale)
    view = {
        "height": {"step": 18},
        "encoding": {"y": text("name", sort=None, title=None), "color": text("engine")},
        "layer": [{"mark": "bar", "encoding": {"x": ratio, "x2": {"datum": 1}}}],
    }
    return Panel(net, ("name", "ratio", "engine"), rows, view)


if __name__ == "__main__":
    main()
