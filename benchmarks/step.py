"""Time, kernels and host reads of whole private steps, next to Opacus, as a user pays them.

    python benchmarks/step.py [--nets lstm vit] [--rounds 5] [--engines fused] [--memory] [--again]
    python benchmarks/step.py --page    # writes the table and the picture of docs/engine.md

A step is ``oracle.backward`` with noise, or Opacus's backward pass and ``pre_step``. All engines of
a net take turns in one process, each for ``TURN`` seconds of the plain step or one step; processor
time on one thread; the median over the rounds of (step / plain step of the same round). Kernels and
reads are those that ``kernels.py`` counts in one step. ``--memory``: MB per sample, the growth of
the peak of live tensors. An engine that materialises every gradient is linear in the rows: it runs
on ``FEW`` rows at most, scaled, and without counts then. Steps above ``SLOW`` plain ones run once.

The file has a record per net: its rows, options and commits. The same command resumes: a net that
was measured at the present commit of ``SOURCES`` with these options is not measured again, unless
by ``--again``.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from kernels import counted
from nets import NETS
from steps import step

from dpbam.app.report.charts import quantity, text
from dpbam.app.report.figure import Figure, Panel
from dpbam.engines.memory import LiveBytes

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "engine.md"
METHODS = ("dp-sgd", "bam", "bam-exact")
OPACUS = [(f"opacus-{mode}", "dp-sgd") for mode in ("hooks", "functorch", "ghost")]
ALL = [*(("fused", m) for m in METHODS), ("functional", "dp-sgd"), *OPACUS]
FEW = {"functional": 256, "opacus-hooks": 256, "opacus-functorch": 256}  # most rows
TURN = 0.02  # seconds
SLOW = 12
SOURCES = ("src/dpbam", "benchmarks/nets.py", "benchmarks/steps.py")
Key = tuple[str, str]
Row = dict[str, Any]
PLAIN: Key = ("plain", "sgd")


def rows_of(key: Key, net: str) -> int:
    return min(FEW.get(key[0], NETS[net].batch), NETS[net].batch)


def prepare(net: str, engines: list[str]) -> dict[Key, Any]:
    """Return the step of every engine that runs this net, after a first call."""
    runs = {}
    for key in [PLAIN, *(key for key in ALL if key[0] in engines)]:
        try:
            run = step(*key, net, rows_of(key, net), noise=True)
            run()
        except Exception as error:
            print(f"  {net}: {key}: {type(error).__name__}: {str(error)[:90]}", flush=True)
        else:
            runs[key] = run
    return runs


def seconds(run: Any, times: int) -> float:
    begin = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - begin) / times


def take_turns(net: str, runs: dict[Key, Any], rounds: int) -> dict[Key, list[float]]:
    """Return the processor seconds of each round, scaled to the whole batch."""
    times = max(1, round(TURN / max(1e-6, min(seconds(runs[PLAIN], 1) for _ in range(3)))))
    turns: dict[Key, list[float]] = {key: [] for key in runs}
    for turn in range(rounds):
        for key, run in runs.items():
            if turn and turns[key][0] > SLOW * turns[PLAIN][0] and times == 1:
                continue
            turns[key].append(seconds(run, times) * NETS[net].batch / rows_of(key, net))
    return turns


def memory(key: Key, net: str) -> float:
    """Return MB per sample: the growth of the peak from a few rows to more."""
    few = min(64, max(4, NETS[net].batch // 8))
    return (peak(key, net, 3 * few) - peak(key, net, few)) / (2 * few) / 1e6


def peak(key: Key, net: str, rows: int) -> int:
    run = step(*key, net, rows)
    run()
    with LiveBytes() as live:
        run()
    return int(live.peak)


def measure(net: str, options: argparse.Namespace) -> list[Row]:
    runs = prepare(net, options.engines)
    turns = take_turns(net, runs, options.rounds)
    rows = []
    for key, each in turns.items():
        whole = rows_of(key, net) == NETS[net].batch
        count = counted(runs[key], private=key[0] in ("fused", "functional"))
        heavy = each[0] > SLOW * turns[PLAIN][0]
        ratio = statistics.median(a / b for a, b in zip(each, turns[PLAIN], strict=False))
        rows.append({
            "net": net, "engine": key[0], "method": key[1], "ratio": round(ratio, 3),
            "seconds": round(statistics.median(each), 5), "rounds": len(each),
            "kernels": count.kernels if whole else None, "reads": count.reads if whole else None,
            "mb_per_sample": round(memory(key, net), 3) if options.memory and not heavy else None,
        })  # fmt: skip
        print(*rows[-1].values(), flush=True)
    return rows


def record(net: str, rows: list[Row], options: argparse.Namespace) -> None:
    """Write one net's rows, and how they were measured, in place of its former ones."""
    path = options.out
    recorded = read(path)
    others = [r for r in recorded.get("rows", []) if r["net"] != net]
    facts = {
        "torch": torch.__version__, "machine": platform.machine(), "threads": 1, "clock": "cpu",
        "batch": {**recorded.get("batch", {}), net: NETS[net].batch},
        "records": {
            **recorded.get("records", {}), net: {**present(options), "commit": commit()}
        },
    }  # fmt: skip
    order = list(NETS)
    together = sorted(others + rows, key=lambda r: order.index(r["net"]))
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({**facts, "rows": together}, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def present(options: argparse.Namespace) -> Row:
    """Return what the figures of a net depend on."""
    return {
        "source": commit(*SOURCES), "rounds": options.rounds, "engines": options.engines,
        "memory": options.memory,
    }  # fmt: skip


def commit(*paths: str) -> str:
    """Return the last commit that changed the paths, of the repository's root; or any."""
    command = ["git", "-C", str(HERE.parent), "log", "-1", "--format=%h", "--", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def plot(rows: list[Row], path: Path) -> None:
    private = [r for r in rows if r["engine"] != "plain"]
    nets = dict.fromkeys(r["net"] for r in rows)
    panels = [bars(net, [r for r in private if r["net"] == net]) for net in nets]
    Figure("step", "Time of a private step", "", "public", panels).save(path)


def bars(net: str, mine: list[Row]) -> Panel:
    rows = [{"name": f"{r['engine']} {r['method']}", "ratio": r["ratio"], "engine": r["engine"]}
            for r in mine]  # fmt: skip
    scale = {"type": "log", "nice": False}
    ratio = quantity("ratio", title="times the plain step", scale=scale)
    view = {
        "height": {"step": 18},
        "encoding": {"y": text("name", sort=None, title=None), "color": text("engine")},
        "layer": [{"mark": "bar", "encoding": {"x": ratio, "x2": {"datum": 1}}}],
    }
    return Panel(net, ("name", "ratio", "engine"), rows, view)


def markdown(rows: list[Row]) -> str:
    """Return the table: by net, the ratio to the plain step, and kernels over plain and reads."""
    by_key = {(r["net"], r["engine"], r["method"]): r for r in rows}
    titles = [f"{engine.replace('opacus-', 'Opacus ')} {m}" for engine, m in ALL]
    titles = [t.removesuffix(" dp-sgd") if t.startswith("Opacus") else t for t in titles]
    lines = ["| net, rows | plain | " + " | ".join(titles) + " |", "|---" * (2 + len(ALL)) + "|"]
    for net in dict.fromkeys(r["net"] for r in rows):
        plain = by_key[net, *PLAIN]
        cells = [cell(by_key.get((net, *key)), plain) for key in ALL]
        cells.insert(0, f"{1e3 * plain['seconds']:.3g} ms, {plain['kernels']}")
        lines.append(f"| {net}, {NETS[net].batch:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(row: Row | None, plain: Row) -> str:
    if row is None:
        return "-"
    ratio = f"{row['ratio']:.2f}" if row["ratio"] < 9.995 else f"{row['ratio']:.3g}"
    if row["kernels"] is None:
        return ratio
    kernels = row["kernels"] / plain["kernels"]
    return f"{ratio} ({kernels:.{1 if kernels < 9.95 else 0}f}, {row['reads']})"


def write_page(rows: list[Row]) -> None:
    """Write the table and the picture of docs/engine.md from the records."""
    start, end = "<!-- table: step -->", "<!-- end -->"
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    assert pattern.search(page), start
    PAGE.write_text(pattern.sub(lambda _: f"{start}\n\n{markdown(rows)}\n\n{end}", page), "utf-8")
    plot(rows, PAGE.parent / "assets" / "step.svg")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=tuple(NETS))
    engines = list(dict.fromkeys(engine for engine, _ in ALL))
    parser.add_argument("--engines", nargs="+", default=engines, choices=engines)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="MB per sample too")
    parser.add_argument("--again", action="store_true", help="also nets that are recorded")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step.json")
    parser.add_argument("--page", action="store_true", help="write docs/engine.md from the file")
    options = parser.parse_args()
    if options.page:
        return write_page(read(options.out)["rows"])
    torch.set_num_threads(1)
    for net in options.nets:
        known = read(options.out).get("records", {}).get(net, {})
        if present(options).items() <= known.items() and not options.again:
            print(f"  {net}: recorded at this commit; --again measures it anew")
            continue
        began = time.process_time()
        record(net, measure(net, options), options)
        print(f"  {net}: {time.process_time() - began:.0f} processor seconds", flush=True)


if __name__ == "__main__":
    main()
