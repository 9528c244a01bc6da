"""The record of a measured step, in memory and as a line of ``non-private/bias.jsonl``.

What was computed from the data without noise has ``non_private`` in its name. The other fields are
public facts of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: Quantiles of the per-unit norms that are recorded.
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

#: Edges of the recorded histogram of norms, as multiples of C: powers of the square root of two.
EDGES = tuple(2 ** (k / 2) for k in range(-8, 17))


@dataclass(frozen=True)
class Reading:
    """The clipped gradient against one reference gradient r: g_clip = a r + c, c orthogonal to r.

    Attributes:
        reference_norm: |r|.
        clipped_norm: |g_clip|.
        bias: |g_clip - r|.
        relative_bias: the bias over |r|.
        a: the factor of the magnitude; at 1 the length along r is right.
        a_from_eta: whether a = (1/l) sum_i f_i eta_i was computed from each unit's eta_i, and not
            as <g_clip, r> / |r|^2. The two are equal: the theorem of Appendix D.
        c_norm: |c|, the directional error.
        orthogonality: <c, r> / (|g_clip| |r|): 0 if the theorem holds.
        magnitude_share: ((a - 1) |r|)^2 / bias^2.
        direction_share: |c|^2 / bias^2; the two shares add up to 1.
        cosine: of g_clip and r.
        private_a: a of the released gradient, noise included.
        private_c_norm: |c| of the released gradient.
        private_cosine: cosine of the released gradient and r.
        noise_share: the part of the noise in the mean squared error bias^2 + variance.
    """

    reference_norm: float
    clipped_norm: float
    bias: float
    relative_bias: float
    a: float
    a_from_eta: bool
    c_norm: float
    orthogonality: float
    magnitude_share: float
    direction_share: float
    cosine: float
    private_a: float
    private_c_norm: float
    private_cosine: float
    noise_share: float


@dataclass(frozen=True)
class Norms:
    """Per-unit norms of one step: of all parameters, or of one layer's.

    Attributes:
        quantiles: at :data:`QUANTILES`; empty if there was no finite unit.
        mean: mean norm.
        counts: units with a norm up to the first of :data:`EDGES` (times C), up to the second, ...,
            above the last; empty for a layer.
    """

    quantiles: tuple[float, ...]
    mean: float
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One layer (a module with parameters of its own).

    Attributes:
        norms: of the units' directions, this layer's entries only.
        share: this layer's part of the units' squared norms; a layer with a large one determines
            what is clipped.
        bias: |g_clip - r| over this layer's entries, r the method's own unclipped gradient.
        relative_bias: the bias over |r| of this layer.
        cosine: of g_clip and r over this layer's entries.
    """

    norms: Norms | None
    share: float | None
    bias: float
    relative_bias: float
    cosine: float


@dataclass(frozen=True, kw_only=True)
class BiasRecord:
    """One measured step.

    Attributes:
        step: from 0.
        method: its name.
        lam: lambda.
        clip_norm: C_t, the clipping's sensitivity at this step.
        batch_size: l, the expected batch size.
        noise_multiplier: sigma.
        noise_norm: sigma C sqrt(d) / l, the noise's expected length (its root mean square).
        non_private_units: units in the batch.
        non_private_broken: units whose direction was not finite, and was replaced by zero.
        non_private_against_plain: against g_hat at theta, the paper's Eq. 1. None where it takes
            another pass that was not asked for (methods that shift theta).
        non_private_against_own: against the method's own unclipped gradient.
        non_private_lemma2_bound: (1/l) sum_i |1 - f_i| |d_i|, which the bias against the method's
            own gradient cannot exceed; for flat clipping (1/l) sum_i max(0, |d_i| - C).
        non_private_norms: of the directions d_i, which are what is clipped.
        non_private_plain_norms: of the plain gradients g_i at theta, where the pass has both.
        non_private_clip_share: share of units that were shortened.
        non_private_alignment: cosine of the method's ascent direction with g_hat, SAM's. Where
            theta is shifted: cos(shift, g_hat); for DP-SAT the shift is along the previous private
            gradient. BAM: mean_i cos(g_i, g_hat). None: not measured, or the method does not
            declare along what it ascends.
        non_private_flatness_slack: lambda (mean_i |g_i| - |mean_i g_i|) = L_BAO - L_Z >= 0, of BAM.
        non_private_layers: by name.
    """

    step: int
    method: str
    lam: float
    clip_norm: float
    batch_size: int
    noise_multiplier: float
    noise_norm: float
    non_private_units: int
    non_private_broken: int
    non_private_against_plain: Reading | None
    non_private_against_own: Reading
    non_private_lemma2_bound: float
    non_private_norms: Norms
    non_private_plain_norms: Norms | None
    non_private_clip_share: float
    non_private_alignment: float | None
    non_private_flatness_slack: float | None
    non_private_layers: dict[str, Layer] = field(default_factory=dict)


def as_columns(records: Sequence[BiasRecord]) -> dict[str, list[Any]]:
    """Return one list per field, nested names joined by a slash; None where a step has no value.

    Quantiles and counts stay tuples. Not to be shared.
    """
    rows = [_flatten(asdict(record)) for record in records]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
