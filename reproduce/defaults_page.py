"""The tables and the picture of docs/how-good.md, from the study's records.

    python -m reproduce.defaults_page        (writes the page's tables and its picture anew)

Regret is the test accuracy of the alternative that validation records select, minus the rule's; the
rule is one of the alternatives. It is negative where validation chose what did worse on test
records.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpbam.auto import Facts, choose
from reproduce.defaults import FITTED, Record
from reproduce.recipes import recipes_folder

LEVELS = "src/dpbam/app/runs/levels.json"
_REFERENCE = "not private"  # no alternative: it spends no budget
Cell = dict[str, Any]
# studies of nets that are next to what auto reached: records, the table's name, auto's data
_NETS = (("other-digits", "digits", "digits"), ("table1-cifar10", "CIFAR-10 at 16x16", "cifar10"))
_FEW = 500  # records
_SHOWN = {"accuracy": "rule", "regret": "regret"}
_COLOURS = {"scattering": "#0072b2", "mobilenet": "#d55e00"}


def cells(records: Sequence[Record]) -> list[Cell]:
    """Return per record: accuracies of rule, best and no privacy on test records, and regret."""
    found = []
    for record in records:
        means = {name: np.mean(rows, axis=0) for name, rows in record["scores"].items()}
        private = {name: m for name, m in means.items() if name != _REFERENCE}
        best = max(private, key=lambda name: float(private[name][0]))
        found.append({
            **{k: record[k] for k in ("source", "features", "n", "epsilon", "constant")},
            "rule": float(means["rule"][1]), "balanced": float(means["rule"][2]),
            "best": float(private[best][1]), "chosen": best,
            "not private": float(means[_REFERENCE][1]),
            "regret": float(private[best][1] - means["rule"][1]),
        })  # fmt: skip
    return found


def regret_table(found: Sequence[Cell]) -> str:
    """Return Markdown: mean and worst regret over the sources left out of fitting, by features."""
    lines = ["| features | sources | cells | mean regret | worst |", "|---|---|---|---|---|"]
    for kind in sorted({cell["features"] for cell in found}):
        left_out = [c for c in found if c["features"] == kind and c["source"] not in FITTED]
        for several in (False, True):
            chosen = [c for c in left_out if (c["n"] > _FEW) == several]
            if not chosen:
                continue
            values = [cell["regret"] for cell in chosen]
            worst = max(chosen, key=lambda cell: float(cell["regret"]))
            sources, size = (
                len({c["source"] for c in chosen}),
                "1,900 and more" if several else "96 or 500",
            )
            lines.append(
                f"| {kind}, n {size} | {sources} | {len(values)} | "
                f"{np.mean(values):.1f} ± {_half_width(values):.1f} | {worst['regret']:.1f} "
                f"({worst['source']} at {worst['epsilon']:g}) |"
            )
    return "\n".join(lines)


def _half_width(values: Sequence[float]) -> float:
    """Return the half width of the 95% t interval of the mean."""
    from scipy.stats import t

    deviation = float(np.std(values, ddof=1))
    return float(t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))


def final_table(records: Sequence[Record]) -> str:
    """Return Markdown: the real command's accuracy by data, model and epsilon, by today's rule."""
    groups: dict[tuple[str, str, float], list[Record]] = defaultdict(list)
    for record in filter(by_present_rule, records):
        groups[record["data"], record["model"], record["facts"]["epsilon"]].append(record)
    lines = ["| data | n | features | epsilon | accuracy, % | balanced, % |"]
    lines.append("|---" * 6 + "|")
    for (data, model, epsilon), runs in sorted(groups.items()):
        accuracies, balanced = (
            ", ".join(
                f"{run[name]:.1f}"
                for run in sorted(runs, key=lambda r: r["seed"])
                if run[name] is not None
            )
            for name in ("accuracy", "balanced_accuracy")
        )
        cells = (data.removesuffix(".npz"), str(runs[0]["facts"]["n"]), model, f"{epsilon:g}",
                 accuracies, balanced)  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_present_rule(record: Record) -> bool:
    """Whether a run had the settings that the rule chooses today from the same facts."""
    facts = {**record["facts"], "image_shape": tuple(record["facts"]["image_shape"])}
    unnamed = {name: None for name in ("encoder", "head") if facts[name] == "none named"}
    choice = choose(Facts(**{**facts, **unnamed}))
    names = ("lr", "release_counts", "release_centre")
    return all(record[name] == getattr(choice, name) for name in names)


def findings_table(records: Sequence[Record]) -> str:
    """Return Markdown: mean accuracy over the findings, of the rule and of the best alternative."""
    groups: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["n"]].append(record)
    lines = ["| n | epsilon | constant | rule | best on validation records |", "|---" * 5 + "|"]
    for n, rows in sorted(groups.items()):
        rule, others = [], []
        for record in rows:
            means = {name: np.mean(scores, axis=0) for name, scores in record["scores"].items()}
            best = max(means, key=lambda name: float(means[name][0]))
            rule.append(f"{means['path 1 C 1'][1]:.1f}")
            others.append(f"{means[best][1]:.1f}")
        epsilons = ", ".join(f"{record['epsilon']:g}" for record in rows)
        cells = (str(n), epsilons, f"{rows[0]['constant']:.1f}", ", ".join(rule), ", ".join(others))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def study_table(found: Sequence[Cell]) -> str:
    """Return Markdown: accuracy and regret of the rule by source and n; all epsilons in one."""
    groups: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in found:
        groups[cell["source"], cell["n"]].append(cell)
    kinds = ("scattering", "mobilenet")
    names = ["source", "n", "constant", *(f"{k}: {what}" for k in kinds for what in _SHOWN)]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for (source, n), row in sorted(groups.items()):
        shown = [source, str(n), f"{row[0]['constant']:.0f}"]
        for kind in kinds:
            of_kind = sorted((c for c in row if c["features"] == kind), key=lambda c: c["epsilon"])
            shown += [", ".join(f"{c[name]:.1f}" for c in of_kind) for name in _SHOWN.values()]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def gains_table(found: Sequence[Cell]) -> str:
    """Return Markdown: what the rule gained by an encoder, more records and more epsilon."""
    places = {(c["source"], c["features"], c["n"], c["epsilon"]): float(c["rule"]) for c in found}
    gains: dict[str, dict[str, float]] = defaultdict(dict)
    for (source, kind, n, epsilon), before in places.items():
        if kind != "scattering":
            continue
        changes = {
            "`--encoder` (an ImageNet net) at epsilon 3": (3.0, "mobilenet", n, 3.0),
            "epsilon 3 instead of 1": (1.0, kind, n, 3.0),
            "epsilon 8 instead of 3": (3.0, kind, n, 8.0),
        }
        for words, (start, *end) in changes.items():
            after = places.get((source, *end))
            if epsilon == start and n <= _FEW and after is not None:
                gains[words][source] = after - before
        more = [m for s, k, m, e in places if (s, k, e) == (source, kind, 3.0) and 3 < m / n < 5]
        if epsilon == 3.0 and more:
            gains[f"about four times the records, from {n}"][source] = (
                places[source, kind, more[0], 3.0] - before
            )
    lines = ["| change | sources | points gained | least and most |", "|---|---|---|---|"]
    for words, by_source in sorted(gains.items()):
        values = list(by_source.values())
        lines.append(
            f"| {words} | {len(values)} | {np.mean(values):+.1f} | "
            f"{min(values):+.1f}, {max(values):+.1f} |"
        )
    return "\n".join(lines)


def updates_table(records: Sequence[Record]) -> str:
    """Return Markdown: parts of an encoder; the rate that validation records chose is bold."""
    groups: dict[tuple[float, str], dict[float, list[Record]]] = defaultdict(dict)
    for r in records:
        groups[r["epsilon"], r["part"]].setdefault(r["lr"], []).append(r)
    rates = sorted({r["lr"] for r in records if r["lr"]})
    names = ("epsilon", "trained (numbers)", "seeds", *(f"lr {rate:g}" for rate in rates))
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for (epsilon, part), by_rate in sorted(groups.items()):
        best = max(by_rate, key=lambda rate: _mean(by_rate[rate], "validation"))
        some = by_rate[best][0]
        count = some.get("seeds", max(len(runs) for runs in by_rate.values()))
        own = ", at its own rate" if 0.0 in by_rate else ""
        shown = [f"{epsilon:g}", f"{part} ({some['trained']}){own}", str(count)]
        for rate in (0.0, *rates[1:]) if 0.0 in by_rate else rates:
            accuracy = f"{_mean(by_rate[rate], 'test'):.1f}" if rate in by_rate else ""
            shown.append(f"**{accuracy}**" if rate == best and rate else accuracy)
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def masks_table(records: Sequence[Record]) -> str:
    """Return Markdown: Dice of auto's defaults, and of what validation records chose, on test."""
    groups: dict[tuple[float, bool, str], list[Record]] = defaultdict(list)
    for r in (record for record in records if record["data"] == "masks"):
        by_rule = r["setting"].get("model") == "auto"
        words = ", ".join(f"{k} {v:g}" for k, v in r["setting"].items() if isinstance(v, float))
        groups[r["epsilon"], not by_rule, words].append(r)
    lines = ["| epsilon | settings | seeds | Dice, % | constant |", "|---|---|---|---|---|"]
    for (epsilon, tuned, words), rows in sorted(groups.items()):
        shown = ", ".join(f"{row['dice']:.1f}" for row in rows)
        what = f"best on validation records: {words}" if tuned else "left out"
        lines.append(
            f"| {epsilon:g} | {what} | {len(rows)} | {shown} | {rows[0]['constant']:.1f} |"
        )
    return "\n".join(lines)


def nets_table(folder: Path) -> str:
    """Return Markdown: nets from scratch, by their best rate or method, next to ``auto``."""
    lines = ["| data | n | epsilon | net | accuracy, % | `auto`, % |", "|---" * 6 + "|"]
    for study, data, reference in _NETS:
        groups: dict[tuple[float, str], list[float]] = defaultdict(list)
        for r in _read(folder / "desk" / f"{study}.jsonl"):
            groups[r["config"]["epsilon"], r["arm"]].append(100 * r["accuracy"])
            net = f"{r['config']['model']}, width {r['config']['model_options']['width']:g}"
            n = r["plan"]["n"]
        for epsilon in sorted({epsilon for epsilon, _ in groups}):
            best = max(float(np.mean(v)) for (e, _), v in groups.items() if e == epsilon)
            at = min(epsilon, 8.0)  # what auto was run at, not above the net's
            head = _mean([
                r for r in _read(folder / "defaults-final.jsonl") if by_present_rule(r) and
                (r["data"], r["model"], r["facts"]["epsilon"]) == (reference, "scattering", at)
            ], "accuracy")  # fmt: skip
            shown = f"{head:.1f}" if at == epsilon else f"{head:.1f} (epsilon {at:g})"
            lines.append(f"| {data} | {n} | {epsilon:g} | {net} | {best:.1f} | {shown} |")
    new = _read(folder / "defaults-nets.jsonl")
    by_rule = {r["source"]: r for r in new if r["setting"]["model"] == "auto"}
    nets: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in new:
        views = r["setting"].get("augment_multiplicity", 0)
        if r["setting"]["model"] != "auto":
            name = f"{r['setting']['model']}, {views or 'no'} augmented views"
            nets[r["source"], name].append(r)
    for (source, name), rows in sorted(nets.items()):
        best = max(float(row["accuracy"]) for row in rows)
        rule = by_rule[source]
        lines.append(
            f"| {source} | {rule['n']} | {rule['epsilon']:g} | {name} | {best:.1f} | "
            f"{rule['accuracy']:.1f} |"
        )
    return "\n".join(lines)


def time_line(records: Sequence[Record]) -> str:
    """Return one sentence: the processor time of ``auto``, features and training included."""
    (record,) = [r for r in records if r["setting"]["model"] == "auto"][:1]
    n, seconds = record["n"], record["seconds"]
    return (
        f"Without an encoder, {n} images of 28x28 took {seconds} s of processor time, features and "
        "evaluation included."
    )


def _mean(records: Sequence[Record], name: str) -> float:
    return float(np.mean([record[name] for record in records]))


def levels(records: Sequence[Record]) -> str:
    """Return the JSON that ``dpbam train --dry-run`` reads: what the rule reached, in short."""
    rows = [
        {
            "source": record["source"], "features": record["features"], "n": record["trained_on"],
            "classes": record["classes"], "epsilon": record["epsilon"],
            "accuracy": round(float(np.mean([row[1] for row in record["scores"]["rule"]])), 1),
            "constant": round(record["constant"], 1),
        }
        for record in records
    ]  # fmt: skip
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def picture(found: Sequence[Cell]) -> str:
    """Return an SVG: regret of every cell by source, and mean accuracy against epsilon."""
    sources = sorted({c["source"] for c in found}, key=lambda s: (s not in FITTED, s))
    height = 60 + 24 * len(sources)
    span = max(4.0, *(abs(c["regret"]) for c in found))
    marks = [_text(10, 20, "Regret, points of test accuracy; blue: scattering, orange: encoder")]
    for value in (-2, 0, 1, 2):
        x = 260 + 180 * value / span
        marks.append(f'<path d="M{x:.1f} 36V{height - 24}" stroke="#bbb"/>')
        marks.append(_text(x - 6, height - 8, f"{value:+g}"))
    for k, source in enumerate(sources):
        y = 50 + 24 * k
        marks.append(_text(10, y + 4, f"{source} (fitted)" if source in FITTED else source))
        for cell in (c for c in found if c["source"] == source):
            x, colour = 260 + 180 * cell["regret"] / span, _COLOURS[cell["features"]]
            marks.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{colour}" opacity="0.6"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {max(height, 260)}" '
        'font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join([*marks, *_curves(found)])
        + "\n</svg>\n"
    )


def _curves(found: Sequence[Cell]) -> list[str]:
    """Draw mean accuracy over the sources against epsilon: rule, best, no privacy."""
    epsilons = sorted({c["epsilon"] for c in found})
    places = {e: 560 + 216 * math.log(e) / math.log(8) for e in epsilons}
    marks = [_text(560, 20, "Mean accuracy against epsilon, %")]
    marks += [_text(x - 3, 250, f"{e:g}") for e, x in places.items()]
    for kind, colour in _COLOURS.items():
        chosen = [c for c in found if c["features"] == kind]
        for name, dashes in {"rule": "", "best": "6 3", _REFERENCE: "2 3"}.items():
            if not chosen:
                continue
            heights = {
                e: 230 - 1.9 * float(np.mean([c[name] for c in chosen if c["epsilon"] == e]))
                for e in epsilons
            }
            points = " ".join(f"{places[e]:.1f},{heights[e]:.1f}" for e in epsilons)
            line = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
            marks.append(f'<polyline points="{points}" fill="none" {line}/>')
            label = "no privacy" if name == _REFERENCE else name
            marks.append(_text(782, heights[epsilons[-1]] + 4, label))
    return marks


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{words}</text>'


def page(text: str, folder: Path) -> str:
    """Return the page's text with its tables made anew from the records in ``folder``."""
    study = cells(_read(folder / "defaults.jsonl"))
    tables: dict[str, Callable[[], str]] = {
        "final": lambda: final_table(_read(folder / "defaults-final.jsonl")),
        "gains": lambda: gains_table(study),
        "regret": lambda: regret_table(study),
        "study": lambda: study_table(study),
        "findings": lambda: findings_table(_read(folder / "defaults-findings.jsonl")),
        "updates": lambda: updates_table(_read(folder / "defaults-lora.jsonl")),
        "masks": lambda: masks_table(_read(folder / "defaults-masks.jsonl")),
        "nets": lambda: nets_table(folder),
        "time": lambda: time_line(_read(folder / "defaults-nets.jsonl")),
    }
    for name, make in tables.items():
        place = re.compile(f"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert place.search(text)  # else the table would be lost
        text = place.sub(lambda m, made=make: f"{m[1]}\n{made()}\n\n{m[2]}", text)  # type: ignore[misc]
    return text


def _read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    root = recipes_folder().parents[1]
    results, docs = root / "reproduce" / "results", root / "docs"
    how_good = docs / "how-good.md"
    how_good.write_text(page(how_good.read_text(encoding="utf-8"), results), encoding="utf-8")
    (root / LEVELS).write_text(levels(_read(results / "defaults.jsonl")), encoding="utf-8")
    shown = picture(cells(_read(results / "defaults.jsonl")))
    (docs / "assets" / "how-good.svg").write_text(shown, encoding="utf-8")
