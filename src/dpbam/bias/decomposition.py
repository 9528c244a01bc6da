"""Appendix D, corrected: the clipped gradient as magnitude and direction.

    g_clip = a r + c,   a = (1/l) sum_i f_i eta_i,   eta_i = <d_i, r> / |r|^2,   <c, r> = 0

with f_i = 1 / M_i = min(1, C / |d_i|) the clip factor (the paper prints the inverse of M_i), r the
reference gradient and l the expected batch size. The bias is (a - 1) r + c.
Not protected by privacy: do not share.

a is computed from the eta_i where the logical batch is one physical batch, so that r is known while
the d_i are available; by linearity as a = <g_clip, r> / |r|^2 otherwise.

Canonical form: a gradient is one float64 vector [d], see :func:`flat`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dpbam.bias.record import Reading


def flat(tree: Mapping[str, Tensor], scale: float = 1.0) -> Tensor:
    """Concatenate to one float64 vector [d], times ``scale``."""
    device = next(iter(tree.values())).device
    home = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
    vector = torch.cat([g.detach().to(home, torch.float64).flatten() for g in tree.values()])
    return vector.mul_(scale)


def decompose(
    clipped: Tensor, reference: Tensor, private: Tensor, *, variance: float, a: float | None = None
) -> Reading:
    """Compare the clipped and the released gradient with a reference r.

    Args:
        clipped: [d] g_clip, divided by l.
        reference: [d] r, divided by l.
        private: [d] the released gradient, noise included.
        variance: d (sigma C / l)^2, the noise's mean squared length.
        a: from the eta_i, if they are known; None takes <g_clip, r> / |r|^2.

    Example: of two orthogonal gradients, 4 and 1 long, the first is clipped to 1; l = 2.
        >>> clipped, plain = torch.tensor([0.5, 0.5]), torch.tensor([2.0, 0.5])
        >>> reading = decompose(clipped, plain, clipped, variance=0.0)
        >>> round(reading.bias, 3), round(reading.a, 3), round(reading.cosine, 3)
        (1.5, 0.294, 0.857)
    """
    length, rr, cr = norm(reference), dot(reference, reference), dot(clipped, reference)
    factor = ratio(cr, rr) if a is None else a
    private_a = ratio(dot(private, reference), rr)
    bias = norm(clipped - reference)  # |g_clip - r|
    c_norm = norm(clipped - factor * reference)  # c = g_clip - a r
    return Reading(
        reference_norm=length,
        clipped_norm=norm(clipped),
        bias=bias,
        relative_bias=ratio(bias, length),
        a=factor,
        a_from_eta=a is not None,
        c_norm=c_norm,
        orthogonality=ratio(cr - factor * rr, norm(clipped) * length),
        magnitude_share=ratio(((factor - 1) * length) ** 2, bias**2),
        direction_share=ratio(c_norm**2, bias**2),
        cosine=cosine(clipped, reference),
        private_a=private_a,
        private_c_norm=norm(private - private_a * reference),
        private_cosine=cosine(private, reference),
        noise_share=ratio(variance, variance + bias**2),
    )


def dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b))


def norm(a: Tensor) -> float:
    return math.sqrt(dot(a, a))


def cosine(a: Tensor, b: Tensor) -> float:
    """Return <a, b> / (|a| |b|); NaN where either is zero."""
    return ratio(dot(a, b), norm(a) * norm(b))


def ratio(x: float, y: float) -> float:
    """Return x / y; NaN where y = 0."""
    return x / y if y else math.nan
