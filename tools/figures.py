"""Draw the first page's picture: ``python tools/figures.py`` writes docs/assets/figures.

Three panels. The first two are a drawing: three gradients and what clipping makes of their mean,
and the same three with the long one shorter. Everything in them is computed from the arrows. The
third is measured: the length of the bias over training (reproduce/results/pocket/methods.jsonl).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "assets" / "figures"
RECORDS = ROOT / "reproduce" / "results" / "pocket" / "methods.jsonl"
C = 1.0
PLAIN = np.array([[-0.4, 3.2], [0.95, -0.2], [0.9, 0.25]])
PENALISED = np.array([[-0.15, 1.4], [0.9, -0.15], [0.85, 0.25]])
ARMS = {"dp-sgd": ("DP-SGD", "mean"), "bam-0.005": ("BAM, λ = 0.005", "one"),
        "bam-0.02": ("BAM, λ = 0.02", "bias")}  # fmt: skip
_SIDE, _UNIT = 340, 68.0  # pixels a panel, pixels C
_ORIGIN = np.array([130.0, 276.0])
_WIDTHS = {"raw": 1.5, "clipped": 2.5, "true": 4.0, "mean": 4.0, "bias": 4.0, "one": 2.5}

_STYLE = """
.card{fill:#fff;stroke:#ddd}.ink,.t-true{fill:#222}.soft{fill:#666}
.ball{fill:#00968814;stroke:#009688;stroke-width:1.5}.axis{stroke:#999;fill:none}
.raw{stroke:#aaa}.true{stroke:#222}.mean,.clipped{stroke:#009688}.bias{stroke:#d9480f}
.one{stroke:#e0a100}.t-mean{fill:#00796b}.t-bias{fill:#d9480f}.t-one{fill:#996f00}
text{font-family:system-ui,Helvetica,Arial,sans-serif;font-size:15px}.head{font-weight:600}
@media (prefers-color-scheme:dark){.card{fill:#1e2129;stroke:#333}.ink,.t-true{fill:#eee}
.soft{fill:#aaa}.raw{stroke:#777b86}.true{stroke:#eee}.mean,.clipped{stroke:#4db6ac}
.bias{stroke:#ff8a4c}.one{stroke:#ffca4d}.t-mean{fill:#4db6ac}.t-bias{fill:#ff8a4c}
.t-one{fill:#ffca4d}}
""".replace("\n", "")


def clipped(g: Array) -> Array:
    """g_i / max(1, |g_i| / C)."""
    return np.asarray(g / np.maximum(1.0, np.linalg.norm(g, axis=1, keepdims=True) / C))


def drawing(title: str, g: Array) -> str:
    """Gradients, the ball of radius C, both means and the bias between them."""
    g_hat, g_clip = g.mean(0), clipped(g).mean(0)
    bias = g_clip - g_hat
    cosine = float(g_hat @ g_clip / np.linalg.norm(g_hat) / np.linalg.norm(g_clip))
    zero = np.zeros(2)
    arrows = [
        *(_arrow(zero, one, "raw") for one in g),
        *(_arrow(zero, one, "clipped") for one in clipped(g)),
        _arrow(zero, g_hat, "true"),
        _arrow(zero, g_clip, "mean"),
        _arrow(g_hat, g_clip, "bias"),
    ]
    x, y = _ORIGIN
    labels = (
        ("soft", "samples' gradients"), ("t-true", "their mean"), ("t-mean", "mean when clipped"),
        ("t-bias", f"bias, length {np.linalg.norm(bias):.2f}"), ("soft", f"cosine {cosine:.2f}"),
    )  # fmt: skip
    texts = "".join(
        f'<text class="{kind}" x="180" y="{72 + 22 * row}">{text}</text>'
        for row, (kind, text) in enumerate(labels)
    )
    ball = f'<circle class="ball" cx="{x}" cy="{y}" r="{C * _UNIT}"/>'
    radius = f'<text class="t-mean" x="{x - 62}" y="{y + 62}">C</text>'
    return _panel(title, ball + radius + "".join(arrows) + texts)


def measured(curves: dict[str, tuple[Array, Array, int]]) -> str:
    """The length of the bias against the step. A curve: steps, bias, how many seeds."""
    most = max(float(bias.max()) for _, bias, _ in curves.values())
    last = max(float(steps.max()) for steps, _, _ in curves.values())
    left, bottom, width, height = 44.0, 300.0, 276.0, 190.0
    drawn = f'<path class="axis" d="M{left} {bottom - height}V{bottom}H{left + width}"/>'
    for row, (arm, (steps, bias, seeds)) in enumerate(curves.items()):
        name, kind = ARMS[arm]
        points = " ".join(
            f"{left + width * s / last:.1f},{bottom - height * b / most:.1f}"
            for s, b in zip(steps, bias, strict=True)
        )
        label = f"{name} ({seeds} seed{'s' * (seeds > 1)})"
        drawn += f'<polyline class="{kind}" fill="none" stroke-width="2" points="{points}"/>'
        drawn += f'<text class="t-{kind}" x="{left + 8}" y="{62 + 19 * row}">{label}</text>'
    drawn += f'<text class="soft" x="8" y="{bottom - height + 5}">{most:.1f}</text>'
    drawn += f'<text class="soft" x="20" y="{bottom + 5}">0</text>'
    drawn += f'<text class="soft" x="{left + width - 62}" y="{bottom + 22}">step {last:.0f}</text>'
    return _panel("Measured: bias over training", drawn)


def curves_of(records: Path) -> dict[str, tuple[Array, Array, int]]:
    """The mean over seeds of the bias against the plain gradient, for each arm on record."""
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    curves = {}
    for arm in ARMS:
        runs = [row for row in rows if row["run"].startswith(f"{arm}-seed-")]
        if runs:
            curves[arm] = _mean_curve([run["non_private_bias"] for run in runs])
    return curves


def _mean_curve(runs: Sequence[Sequence[dict[str, dict[str, float]]]]) -> tuple[Array, Array, int]:
    steps = np.array([float(step["step"]) for step in runs[0]])  # type: ignore[arg-type]
    bias = np.array([[step["non_private_against_plain"]["bias"] for step in run] for run in runs])
    return steps, bias.mean(0), len(runs)


def _panel(title: str, body: str) -> str:
    size = f'viewBox="0 0 {_SIDE} {_SIDE + 20}" width="{_SIDE}" height="{_SIDE + 20}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
        f"<title>{title}</title><style>{_STYLE}</style>"
        '<rect class="card" x="0.5" y="0.5" width="339" height="359" rx="10"/>'
        f'<text class="ink head" x="18" y="32">{title}</text>{body}</svg>\n'
    )


def _arrow(start: Array, end: Array, kind: str) -> str:
    """A line with a head, y upwards."""
    a, b = (_ORIGIN + np.array([p[0], -p[1]]) * _UNIT for p in (start, end))
    along = (b - a) / max(float(np.linalg.norm(b - a)), 1e-9)
    across = np.array([-along[1], along[0]])
    width = _WIDTHS[kind]
    head = min(3.0 + 1.6 * width, 0.6 * float(np.linalg.norm(b - a)))
    tips = [b - head * (along + sign * 0.5 * across) for sign in (1, -1)]
    points = " ".join(f"{p[0]:.1f},{p[1]:.1f}" for p in (tips[0], b, tips[1]))
    return (
        f'<g class="{kind}" fill="none" stroke-linecap="round" stroke-width="{width}">'
        f'<path d="M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}"/><polyline points="{points}"/></g>'
    )


def main() -> None:
    """Draw the three panels."""
    parser = argparse.ArgumentParser(description="Draw the first page's picture.")
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    panels = {
        "clipping.svg": drawing("Clipping puts in a bias", PLAIN),
        "bam.svg": drawing("BAM: there is less to clip", PENALISED),
        "measured.svg": measured(curves_of(RECORDS)),
    }
    for name, svg in panels.items():
        (out / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
