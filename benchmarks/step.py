"""Time and memory of one step on ten nets, engine by engine, as multiples of the plain step.

All engines of a net take turns in one process; processor time on one thread; the median over the
rounds of (step / plain step of the same round). There are two plain steps: as users write it, and
with the fused engine's kernels for single layers (Mish, group norm, average pooling). ``auto`` is
what the oracle does by default: it chooses the engine and the physical batch size.

Memory is the growth of the peak of live tensors per sample, counted tensor by tensor. Engines that
materialise every gradient are linear in the rows: they are timed on ``FEW`` rows at most, scaled.
Steps above ``SLOW`` plain ones run once.

    python benchmarks/step.py [--nets lstm vit] [--rounds 5] [--out FILE] [--jax PYTHON] [--again]
    python benchmarks/step.py --page    # writes the tables and the picture of docs/engine.md

``--noise`` times whole steps, ``oracle.backward`` with noise and Opacus' ``pre_step``, as a user
pays them; without it the sum of clipped directions. ``mlp-tiny`` and ``mlp-large`` (9.5 M
parameters) are among the nets.

``--jax`` names a Python that has jax, for two nets; by default this one, if it has. The file has a
record per net: its rows, command and commits. The same command resumes: a net that was measured at
the present commit of ``SOURCES`` with these options is not measured again, unless by ``--again``.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from nets import NETS, TEN
from steps import step

from dpbam.app.report.charts import quantity, text
from dpbam.app.report.figure import Figure, Panel
from dpbam.engines.memory import LiveBytes

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "engine.md"
NOISY = HERE / "results" / "step_noise.json"  # of whole steps, by --noise
METHODS = ("dp-sgd", "bam", "bam-exact")
OURS = [(engine, m) for engine in ("auto", "fused", "functional", "loop") for m in METHODS]
OPACUS = [(f"opacus-{mode}", "dp-sgd") for mode in ("hooks", "functorch", "ghost")]
#: What the page shows; auto is the fused engine where the batch is one physical batch.
SHOWN = {"plain", "fused", "functional", *(engine for engine, _ in OPACUS)}
ALL = [("plain", "sgd"), ("plain-ours", "sgd"), *OURS, *OPACUS]
JAX = {"resnet9": 0.5, "resnet9-64": 1.0}  # net: width
FEW = {"loop": 2, "functional": 256, "opacus-hooks": 256, "opacus-functorch": 256}  # most rows
SLOW = 12
SOURCES = ("src/dpbam", "benchmarks/nets.py", "benchmarks/steps.py")
Key = tuple[str, str]
Row = dict[str, Any]


def rows_of(key: Key, net: str) -> int:
    return min(FEW.get(key[0], NETS[net].batch), NETS[net].batch)


def made(net: str, engines: list[str], *, noise: bool) -> dict[Key, Any]:
    """Return the step of every engine that runs this net, after a first call."""
    found = {}
    for key in [key for key in ALL if key[0] in engines or key[0] == "plain"]:
        try:
            run = step(*key, net, rows_of(key, net), noise=noise)
            run()
        except Exception as error:
            print(f"  {net}: {key}: {type(error).__name__}: {str(error)[:90]}", flush=True)
        else:
            found[key] = run
    return found


def seconds(run: Any) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def times(net: str, rounds: int, engines: list[str], *, noise: bool) -> dict[Key, list[float]]:
    """Return the processor seconds of each round, scaled to the whole batch."""
    runs = made(net, engines, noise=noise)
    found: dict[Key, list[float]] = {key: [] for key in runs}
    for turn in range(rounds):
        plain = seconds(runs["plain", "sgd"])
        found["plain", "sgd"].append(plain)
        for key, run in runs.items():
            if key[0] == "plain" or (turn and found[key][0] > SLOW * found["plain", "sgd"][0]):
                continue
            found[key].append(seconds(run) * NETS[net].batch / rows_of(key, net))
    return found


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


def table(net: str, options: argparse.Namespace) -> list[Row]:
    found = times(net, options.rounds, options.engines, noise=options.noise)
    plain = found["plain", "sgd"]
    ours = found.get(("plain-ours", "sgd"), plain)
    rows = []
    for key, each in found.items():
        heavy = key[0] in ("auto", "loop") or each[0] > SLOW * plain[0]  # auto's is its engine's
        rows.append({
            "net": net, "engine": key[0], "method": key[1],
            "ratio": round(_ratio(each, plain), 3), "to_plain_ours": round(_ratio(each, ours), 3),
            "seconds": round(statistics.median(each), 4), "rounds": len(each),
            "mb_per_sample": None if heavy or options.no_memory else round(memory(key, net), 3),
        })  # fmt: skip
        show(rows[-1])
    return rows


def _ratio(each: list[float], plain: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(each, plain, strict=False))


def jax_rows(python: str, net: str, plain: float) -> list[Row]:
    command = [
        python, str(HERE / "jax_step.py"), "--width", str(JAX[net]), "--batch",
        str(NETS[net].batch), "--clock", "cpu", "--threads", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  jax on {net}: {done.stderr.strip().splitlines()[-1][:100]}")
        return []
    return [
        {"net": net, "engine": "jax-vmap", "method": m, "ratio": round(s / plain, 3),
         "seconds": round(s, 4), "mb_per_sample": None}
        for m, s in json.loads(done.stdout).items()
    ]  # fmt: skip


def show(each: Row) -> None:
    mb = each["mb_per_sample"]
    size = "" if mb is None else f"{mb:9.3f} MB/sample"
    print(f"{each['net']:13} {each['engine']:17} {each['method']:10} {each['ratio']:7.2f} {size}",
          flush=True)  # fmt: skip


def record(net: str, rows: list[Row], options: argparse.Namespace) -> None:
    """Write one net's rows, and how they were measured, in place of its former ones."""
    path = options.out
    held = json.loads(path.read_text()) if path.exists() else {}
    kept = [r for r in held.get("rows", []) if r["net"] != net]
    records = {**held.get("records", {}), net: {**present(options), "commit": commit()}}
    facts = {
        "torch": torch.__version__, "machine": platform.machine(), "threads": 1, "clock": "cpu",
        "batch": {**held.get("batch", {}), net: NETS[net].batch}, "records": records,
    }  # fmt: skip
    order = list(NETS)
    together = sorted(kept + rows, key=lambda r: order.index(r["net"]))
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({**facts, "rows": together}, indent=1) + "\n")
    plot(together, path.with_suffix(".png"))


def present(options: argparse.Namespace) -> Row:
    """Return what the figures of a net depend on."""
    return {
        "source": commit(*SOURCES), "rounds": options.rounds, "engines": options.engines,
        "memory": not options.no_memory, "jax": options.jax is not None,
        "noise": options.noise,
    }  # fmt: skip


def is_recorded(net: str, options: argparse.Namespace) -> bool:
    held = json.loads(options.out.read_text()) if options.out.exists() else {}
    found = held.get("records", {}).get(net, {})
    return present(options).items() <= found.items()


def commit(*paths: str) -> str:
    """Return the last commit that changed the paths, of the repository's root; or any."""
    command = ["git", "-C", str(HERE.parent), "log", "-1", "--format=%h", "--", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def plot(rows: list[Row], path: Path) -> None:
    private = [r for r in rows if not r["engine"].startswith("plain") and r["engine"] != "loop"]
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
    """Return the table: ratio to the plain step, and MB per sample."""
    nets = list(dict.fromkeys(r["net"] for r in rows))
    found = {(r["engine"], r["method"], r["net"]): r for r in rows}
    lines = ["| | " + " | ".join(nets) + " |", "|---" * (1 + len(nets)) + "|"]
    for engine, method in dict.fromkeys((r["engine"], r["method"]) for r in rows):
        cells = [cell(found.get((engine, method, net))) for net in nets]
        lines.append(f"| {engine} {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(row: Row | None) -> str:
    if row is None:
        return "-"
    ratio = row["ratio"]
    shown = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"
    mb = row["mb_per_sample"]
    return shown if mb is None else f"{shown}, {mb:.2g} MB"


def write_between(name: str, table: str) -> None:
    """Write a table into docs/engine.md, between its markers."""
    start, end = f"<!-- table: {name} -->", "<!-- end -->"
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    assert pattern.search(page), start
    PAGE.write_text(pattern.sub(lambda _: f"{start}\n\n{table}\n\n{end}", page), "utf-8")


def write_page(rows: list[Row]) -> None:
    """Write the tables and the picture of docs/engine.md from the records."""
    write_between("step", markdown([r for r in rows if r["engine"] in SHOWN]))
    if NOISY.exists():
        write_between("step-noise", markdown(json.loads(NOISY.read_text())["rows"]))
    plot(rows, PAGE.parent / "assets" / "step.svg")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=TEN, choices=tuple(NETS))
    engines = list(dict.fromkeys(engine for engine, _ in ALL))
    parser.add_argument("--engines", nargs="+", default=engines, choices=engines)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--noise", action="store_true", help="whole steps, as a user pays them")
    parser.add_argument("--no-memory", action="store_true")
    here = sys.executable if find_spec("jax") else None
    parser.add_argument("--jax", metavar="PYTHON", default=here)
    parser.add_argument("--again", action="store_true", help="also nets that are recorded")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step.json")
    parser.add_argument("--page", action="store_true", help="write docs/engine.md from the file")
    options = parser.parse_args()
    if options.page:
        return write_page(json.loads(options.out.read_text())["rows"])
    torch.set_num_threads(1)
    for net in options.nets:
        if is_recorded(net, options) and not options.again:
            print(f"  {net}: recorded at this commit; --again measures it anew")
            continue
        began = time.process_time()
        rows = table(net, options)
        if options.jax and net in JAX:
            rows += jax_rows(options.jax, net, rows[0]["seconds"])
        record(net, rows, options)
        print(f"  {net}: {time.process_time() - began:.0f} processor seconds", flush=True)


if __name__ == "__main__":
    main()
