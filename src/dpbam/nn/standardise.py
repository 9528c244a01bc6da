"""Weight standardisation: convolutions whose weight is centred, and optionally scaled, at each use.

Notation: V is the trained weight, [o, i, *kernel]; m = i * prod(kernel) the fan-in of an output
channel; mean_o and var_o the mean and the biased variance (divided by m, not m - 1) of the m
entries of channel o. The convolution uses W = s(V):

=============  ===================================================  ==========================
``scale``      W_o                                                  used in
=============  ===================================================  ==========================
``False``      V_o - mean_o                                         the paper's CIFAR runs
``True``       (V_o - mean_o) / sqrt(var_o + eps)                   after De et al. (2022)
=============  ===================================================  ==========================

There is no fan-in factor and no gain (De et al. have 1/sqrt(m) and a trained gain), because in our
models a normalisation follows each of these convolutions and cancels any factor. Without one,
``scale=True`` makes activations sqrt(m) times larger per layer.

The map is a function of the weight alone, so samples do not mix, and the gradient of a sample with
respect to V is J_s^T applied to that with respect to W. With G the gradient of one channel of W and
what = W_o, for ``scale=True``::

    J_s^T G = (G - mean(G) - what * mean(what * G)) / sqrt(var_o + eps)
    J_s^T G =  G - mean(G)                                               for scale=False

The first is exact with eps too, which ``what`` contains. The map is constant along V_o + c, so both
are orthogonal to constants: mean(J_s^T G) = 0.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from dpbam.errors import ArgumentError

WeightStandardisation = Literal["none", "centre", "scale"]
_EPS = 1e-6  # far below 1 / (3 m), the variance that torch draws weights with, for m up to 1e5


def standardised(weight: Tensor, scale: bool, eps: float) -> Tensor:
    """Return W = s(V) by the table above; a torch function, so that an engine can recognise it.

    Example:
        >>> import torch
        >>> standardised(torch.tensor([[1.0, 3.0]]), False, 0.0)
        tensor([[-1.,  1.]])
    """
    if has_torch_function_unary(weight):
        done: Tensor = handle_torch_function(standardised, (weight,), weight, scale, eps)
        return done
    axes = tuple(range(1, weight.ndim))
    centred = weight - weight.mean(axes, keepdim=True)  # V_o - mean_o
    if not scale:
        return centred
    variance = centred.square().mean(axes, keepdim=True)  # var_o, biased
    return centred / (variance + eps).sqrt()


class _Standardised(nn.modules.conv._ConvNd):
    """Base class of the standardised convolutions of one, two and three dimensions."""

    scale: bool
    eps: float

    def __init__(self, *args: Any, scale: bool = True, eps: float = _EPS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.weight[0].numel() == 1:
            raise ArgumentError(
                "a standardised convolution has a fan-in of one, so centring would make its weight "
                "zero: use a plain convolution there, a larger kernel or fewer groups"
            )
        self.scale, self.eps = scale, eps

    def standardised_weight(self) -> Tensor:
        """Return W = s(V): [o, i, *kernel]."""
        return standardised(self.weight, self.scale, self.eps)

    def forward(self, input: Tensor) -> Tensor:
        # each of torch's three convolutions has this method, with these arguments
        output: Tensor = self._conv_forward(input, self.standardised_weight(), self.bias)
        return output

    def extra_repr(self) -> str:
        shape: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{shape}, scale={self.scale}, eps={self.eps}"


class StandardisedConv1d(_Standardised, nn.Conv1d):
    """``torch.nn.Conv1d`` with a standardised weight: see :class:`StandardisedConv2d`."""


class StandardisedConv2d(_Standardised, nn.Conv2d):
    """``torch.nn.Conv2d`` whose weight is centred, and optionally scaled, per output channel.

    W_o = (V_o - mean_o) / sqrt(var_o + eps), without the division if not ``scale``. A normalisation
    should follow: see :mod:`dpbam.nn.standardise`. A constant channel has W_o = 0.

    Args:
        *args: as for ``torch.nn.Conv2d``.
        scale: divide by the deviation too.
        eps: added to the variance under the root.
        **kwargs: as for ``torch.nn.Conv2d``.

    Example:
        >>> import torch
        >>> conv = StandardisedConv2d(3, 8, 3, padding=1, bias=False, scale=True)
        >>> w = conv.standardised_weight().flatten(1)
        >>> bool(w.mean(1).abs().max() < 1e-6), bool((w.square().mean(1) - 1).abs().max() < 1e-3)
        (True, True)
    """


class StandardisedConv3d(_Standardised, nn.Conv3d):
    """``torch.nn.Conv3d`` with a standardised weight: see :class:`StandardisedConv2d`."""


def convolution(
    in_channels: int,
    out_channels: int,
    kernel_size: int = 3,
    *,
    stride: int = 1,
    weight_standardisation: WeightStandardisation = "none",
) -> nn.Conv2d:
    """Return a convolution without bias, padded to keep the size at stride 1."""
    shape = (in_channels, out_channels, kernel_size)
    padding = kernel_size // 2
    if weight_standardisation == "none":
        return nn.Conv2d(*shape, stride=stride, padding=padding, bias=False)
    scale = weight_standardisation == "scale"
    return StandardisedConv2d(*shape, stride=stride, padding=padding, bias=False, scale=scale)
