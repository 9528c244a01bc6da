"""``dpbam methods``: what is built in against clipping bias and noise, and what it costs."""

from __future__ import annotations

from typing import NamedTuple

from dpbam.app.cli.output import Json, print_json, say, table


class Part(NamedTuple):
    """A built-in method, clipping, filter or optimiser, in one line."""

    flag: str
    name: str
    formula: str
    reference: str
    cost: str
    use: str


_SAME = "that of DP-SGD"
_FREE = "none: it sees released gradients alone"
_METHOD, _CLIPPING, _FILTER = "--method", "--clipping", "--filter"
PARTS = (
    Part(_METHOD, "dp-sgd", "g_i", "Abadi et al. 2016", _SAME, "the baseline"),
    Part(_METHOD, "dp-sat", "g_i(theta + lambda u), u the previous private gradient",
         "Park et al. 2023", _SAME, "flat minima at the speed of dp-sgd"),
    Part(_METHOD, "bam", "g_i(theta + lambda g_i / |g_i|)", "the paper, Eq. 12",
         _SAME + "; two gradients", "most units are clipped, and noise does not dominate"),
    Part(_METHOD, "disk", "a d_i(theta + gamma v) + (1 - a) d_i(theta), then a Kalman step",
         "Zhang et al. 2025", _SAME, "noise dominates and steps are many; not with momentum"),
    Part(_METHOD, "sgd", "g_i, neither clipped nor noised", "", "no privacy", "a reference"),
    Part(_METHOD, "sam", "g_i(theta + lambda u), u the batch gradient", "Foret et al. 2021",
         "no privacy", "a reference"),
    Part(_CLIPPING, "flat", "min(1, C / |d|) d", "Abadi et al. 2016", _SAME,
         "C is known, for example from dpbam bias"),
    Part(_CLIPPING, "automatic", "C d / (|d| + gamma)", "Bu et al. 2023", _SAME,
         "C is unknown: only lr C matters"),
    Part(_CLIPPING, "per-layer", "each of G layers clipped to C / sqrt(G)", "McMahan et al. 2018",
         _SAME, "one layer outweighs the others"),
    Part(_CLIPPING, "normalised", "C d / |d|", "Yang et al. 2022", _SAME,
         "norms fall below C during training"),
    Part(_CLIPPING, "psac", "C d / (|d| + r / (|d| + r))", "Xia et al. 2023", _SAME,
         "as automatic, with many small gradients"),
    Part(_CLIPPING, "quantile", "min(1, C_t / |d|) d, C_t a private quantile of norms",
         "Andrew et al. 2021", "noise over C grows by sqrt(1 + rho^2): 0.5% at rho = 0.1",
         "C is unknown and norms change"),
    Part(_CLIPPING, "slaclip", "min(1, C_t / |d|) d, C_t from the slack C - |clipped d|",
         "Zou et al. 2026", _SAME, "the same; the distribution of norms comes with it"),
    Part(_FILTER, "exponential", "m = beta m + (1 - beta) g, divided by 1 - beta^t",
         "Kingma and Ba 2015", _FREE, "sgd without momentum"),
    Part(_FILTER, "doppler", "m = sum_k b_k g_(t-k) - sum_k a_k m_(t-k)", "Zhang et al. 2024",
         _FREE, "noise well above the signal; not with momentum"),
    Part("--correct-noise", "nadam, adam, adamw", "m / sqrt(max(v - noise's variance, floor))",
         "DP-AdamBC, Tang et al. 2023", "none: the variance is public",
         "Adam where noise dominates; refused with a filter"),
)  # fmt: skip


def _methods(json: Json = False) -> None:
    """List methods, clippings, filters and corrections, with formula, privacy cost and use.

    Each of the first three also takes module:Name, code of your own.

    Examples:
        $ dpbam methods
        $ dpbam methods --json
    """
    if json:
        print_json([part._asdict() for part in PARTS])
        return
    header = ("flag", "name", "what it does", "privacy cost", "use it if")
    rows = [
        (flag, name, f"{formula} ({source})" if source else formula, cost, use)
        for flag, name, formula, source, cost, use in PARTS
    ]
    say(table(header, rows, left=5))
    say("--method, --clipping and --filter also take module:Name, code of your own.")


COMMANDS = {"methods": _methods}
