"""Weight standardisation: convolutions whose weight is centred, and perhaps scaled, at each use.

Notation: V the weight that is trained, [o, i, *kernel]; m = i * prod(kernel) the fan-in of an
output channel; mean_o and var_o the mean and the biased variance (divided by m, not m - 1) of
channel o's m entries. The convolution is done with W = s(V):

=============  ===================================================  ==========================
``scale``      W_o                                                  whose
=============  ===================================================  ==========================
``False``      V_o - mean_o                                         the paper's CIFAR runs
``True``       (V_o - mean_o) / sqrt(var_o + eps)                   after De et al. (2022)
=============  ===================================================  ==========================

There is no fan-in factor and no gain (De et al. have 1/sqrt(m) and a trained gain): a normalisation
follows each of these convolutions here, and undoes any factor. Without one, ``scale=True`` makes
activations sqrt(m) times larger a layer.

The map is a function of the weight alone, so it mixes no samples and a sample's gradient in V is
J_s^T applied to its gradient in W. With G the gradient in W of one channel and what = W_o, for
``scale=True``::

    J_s^T G = (G - mean(G) - what * mean(what * G)) / sqrt(var_o + eps)
    J_s^T G =  G - mean(G)                                               for scale=False

The first is exact with eps too, since what has eps in it. The map is constant along V_o + c, so
both are orthogonal to constants: mean(J_s^T G) = 0.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from dpbam.errors import ArgumentError

WeightStandardisation = Literal["none", "centre", "scale"]
_EPS = 1e-6  # far below 1 / (3 m), the variance that torch draws weights with, for m up to 1e5


def standardised(weight: Tensor, scale: bool, eps: float) -> Tensor:
    """W = s(V), by the table above; a torch function of its own, so that an engine can know it.

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
    """What the standardised convolutions of one, two and three dimensions share."""

    scale: bool
    eps: float

    def __init__(self, *args: Any, scale: bool = True, eps: float = _EPS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_fan_in_of_one(self, "a standardised convolution")
        self.scale, self.eps = scale, eps

    def standardised_weight(self) -> Tensor:
        """W = s(V), [o, i, *kernel], by the formula in the class's docstring."""
        return standardised(self.weight, self.scale, self.eps)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of ``input`` with :meth:`standardised_weight`."""
        # each of torch's three convolutions has this method, with these arguments
        output: Tensor = self._conv_forward(input, self.standardised_weight(), self.bias)
        return output

    def extra_repr(self) -> str:
        """Torch's own, and the two settings."""
        own: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{own}, scale={self.scale}, eps={self.eps}"


class StandardisedConv1d(_Standardised, nn.Conv1d):
    """``torch.nn.Conv1d`` with a standardised weight: see :class:`StandardisedConv2d`."""


class StandardisedConv2d(_Standardised, nn.Conv2d):
    """``torch.nn.Conv2d`` whose output channels' weights are centred, and perhaps scaled, each use.

    Per output channel o with fan-in m = i * h * w, mean and biased variance over its m entries::

        W_o = V_o - mean_o                          scale=False (the paper's CIFAR runs)
        W_o = (V_o - mean_o) / sqrt(var_o + eps)    scale=True  (after De et al. 2022)

    No fan-in factor and no gain: put a normalisation behind it. A constant channel gives W_o = 0.

    Args:
        *args: as for ``torch.nn.Conv2d``.
        scale: divide by the deviation too.
        eps: added to the variance under the root.
        **kwargs: as for ``torch.nn.Conv2d``.

    Shapes: weight (V) and :meth:`standardised_weight` (W) [o, i, h, w]; input [n, c, y, x].

    Example:
        >>> import torch
        >>> conv = StandardisedConv2d(3, 8, 3, padding=1, bias=False, scale=True)
        >>> w = conv.standardised_weight().flatten(1)
        >>> bool(w.mean(1).abs().max() < 1e-6), bool((w.square().mean(1) - 1).abs().max() < 1e-3)
        (True, True)
        >>> conv(torch.zeros(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """


class StandardisedConv3d(_Standardised, nn.Conv3d):
    """``torch.nn.Conv3d`` with a standardised weight: see :class:`StandardisedConv2d`."""


_STANDARDISED: dict[type[nn.Module], type[_Standardised]] = {
    nn.Conv1d: StandardisedConv1d,
    nn.Conv2d: StandardisedConv2d,
    nn.Conv3d: StandardisedConv3d,
}


def standardise_convolutions(
    model: nn.Module, *, scale: bool = True, eps: float = _EPS
) -> nn.Module:
    """Turn every ``Conv1d``, ``Conv2d`` and ``Conv3d`` of a model into its standardised form.

    In place: parameters, their names and hooks stay, so an optimiser made before stays right. A
    convolution that is already standardised stays as it is; subclasses and parametrised ones are
    left alone, since what they do with their weight is not known here.

    Args:
        model: any model; it may itself be a convolution.
        scale: divide by the deviation too; then a normalisation should follow each convolution.
        eps: added to the variance under the root.

    Returns:
        The same model.

    Raises:
        ValueError: for a convolution with a fan-in of one, whose centred weight would be zero.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU())
        >>> type(standardise_convolutions(net, scale=False)[0]).__name__
        'StandardisedConv2d'
    """
    found = [(path, m) for path, m in model.named_modules() if type(m) in _STANDARDISED]
    for path, module in found:
        _refuse_fan_in_of_one(module, f"convolution {path!r}")
    for _, module in found:
        # a new class for the same object: what torch's parametrisations do, and for their reason,
        # that parameters, buffers, hooks and references to the module stay whole
        module.__class__ = _STANDARDISED[type(module)]
        module.scale, module.eps = scale, eps
    return model


def _refuse_fan_in_of_one(module: nn.Module, what: str) -> None:
    assert isinstance(module.weight, Tensor)
    if module.weight[0].numel() == 1:
        raise ArgumentError(
            f"{what} has a fan-in of one, so centring would make its weight zero: use a plain "
            "convolution there, a larger kernel or fewer groups"
        )


def convolution(
    in_channels: int,
    out_channels: int,
    kernel_size: int = 3,
    *,
    stride: int = 1,
    weight_standardisation: WeightStandardisation = "none",
) -> nn.Conv2d:
    """A convolution without bias, padded to keep the size at stride 1, standardised as asked.

    Example:
        >>> convolution(3, 8, weight_standardisation="centre").scale
        False
        >>> type(convolution(3, 8)).__name__
        'Conv2d'
    """
    shape = (in_channels, out_channels, kernel_size)
    padding = kernel_size // 2
    if weight_standardisation == "none":
        return nn.Conv2d(*shape, stride=stride, padding=padding, bias=False)
    scale = weight_standardisation == "scale"
    return StandardisedConv2d(*shape, stride=stride, padding=padding, bias=False, scale=scale)
