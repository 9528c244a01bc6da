"""Refuse, or replace, layers that private training does not allow.

Clipping bounds a sample's contribution to the sum only if the sample's gradient does not depend on
other samples, and a released model may contain only what noise was added to.

=============================  ============================================  ====================
layer                          what it does                                  allowed when
=============================  ============================================  ====================
batch norm                     training: mixes the samples of a batch, and   in eval, with running
                               keeps running statistics without noise        statistics
instance norm that tracks      training: keeps running statistics            in eval
spectral norm                  training: every forward pass changes its      in eval
                               power iteration's vectors
embedding with ``max_norm``    rescales the rows that a batch looks up, in   never
                               place and without noise
lazy layer                     has no parameters yet to protect              initialised
=============================  ============================================  ====================

A layer in eval uses constants, so it neither mixes samples nor keeps state. If it was trained on
sensitive data, those constants are not covered by the guarantee of this run.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from dpbam.errors import ArgumentError
from dpbam.nn.models import group_count
from dpbam.params import modules_of

_LEAST_VECTOR_GROUP = 16  # BatchNorm1d often has one value per channel: two become -1 and 1


def check_model(model: nn.Module) -> None:
    """Refuse a model with a layer that mixes samples or keeps running state of them.

    It is called at every step, since ``model.train()`` during a run switches a batch norm on again.

    Example:
        >>> check_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        Traceback (most recent call last):
        dpbam.errors.ArgumentError: layer '1' (BatchNorm2d) mixes the samples of a batch, so ...
        >>> check_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval())
    """
    for path, module in modules_of(model):
        if problem := _problem(module):
            where = f"layer {path!r}" if path else "the model itself"
            raise ArgumentError(f"{where} ({type(module).__name__}) {problem}")


def check_trainable(model: nn.Module) -> None:
    """Refuse a model in which no parameter has ``requires_grad``."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ArgumentError(
            "the model has no trainable parameter: give it one, or unfreeze some with "
            "parameter.requires_grad_(True)"
        )


def _problem(module: nn.Module) -> str | None:
    """The problem of one module, as the predicate of a sentence."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "is lazy and has no parameters yet: run the model once on a sample first"
    if isinstance(module, _BatchNorm):
        return _batch_norm_problem(module)
    if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
        return (
            "keeps running statistics of the samples without noise: call "
            "dpbam.nn.replace_batch_norm(model), or give it track_running_stats=False"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return (
            "rescales the rows that the samples look up, in place and without noise: give it "
            "max_norm=None"
        )
    if module.training and _keeps_power_iteration(module):
        return (
            "keeps the vectors of a spectral norm's power iteration, which every forward pass "
            "changes: remove the spectral norm, or put this layer in eval with .eval()"
        )
    return None


def _batch_norm_problem(module: _BatchNorm) -> str | None:
    if module.running_mean is None:  # without them it takes the batch's statistics in eval too
        return (
            "mixes the samples of a batch, and in eval too since it has no running statistics: "
            "call dpbam.nn.replace_batch_norm(model)"
        )
    if module.training:
        return (
            "mixes the samples of a batch, so that no sample's gradient is its own: call "
            "dpbam.nn.replace_batch_norm(model), or put this layer in eval with .eval()"
        )
    return None


def _keeps_power_iteration(module: nn.Module) -> bool:
    if isinstance(module, _SpectralNorm):
        return hasattr(module, "_u")  # a vector's spectral norm is its length: no iteration
    return any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Replace every batch norm by a group norm, and stop instance norms from keeping statistics.

    ``BatchNorm2d``, ``BatchNorm3d`` and ``SyncBatchNorm`` get as many groups as divide their
    channels, at most 32 and each of at least 2 channels; ``BatchNorm1d``, which may see one value
    per channel, groups of at least 16 (or one group). Scale and shift stay the same parameter
    objects; running statistics are dropped. Shapes are preserved, values are not: a pre-trained
    model has to be trained further. The model is changed in place, and a new one is returned only
    if it is itself a batch norm.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48))
        >>> replace_batch_norm(net)[1].num_groups
        24
    """
    # 1. make every replacement first, so that a refusal leaves the model unchanged
    old = [(path, m) for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
    new: dict[nn.Module | None, nn.Module] = {m: _group_norm_of(m, path) for path, m in old}
    for path, module in model.named_modules():
        if isinstance(module, _InstanceNorm):
            _refuse_lazy(module, path)
    # 2. register them in every place of the old ones: a shared layer stays shared
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in new:
                parent.register_module(name, new[child])
        if isinstance(parent, _InstanceNorm):
            parent.track_running_stats = False
            parent.running_mean = parent.running_var = parent.num_batches_tracked = None
    return new.get(model, model)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether :func:`replace_batch_norm` would change anything."""
    return any(
        isinstance(m, _BatchNorm) or (isinstance(m, _InstanceNorm) and m.track_running_stats)
        for m in model.modules()
    )


def _group_norm_of(old: _BatchNorm, path: str) -> nn.GroupNorm:
    _refuse_lazy(old, path)
    vectors = isinstance(old, nn.BatchNorm1d)
    if vectors and old.num_features == 1:
        raise ArgumentError(
            f"layer {path!r} (BatchNorm1d) has one channel, which a group norm would make constant "
            "where it holds one value: remove it, or use GroupNorm(1, 1) if it sees sequences"
        )
    least_size = _LEAST_VECTOR_GROUP if vectors else 2
    groups = group_count(old.num_features, least_size=least_size)
    new = nn.GroupNorm(groups, old.num_features, eps=old.eps, affine=False)
    if old.affine:
        new.affine, new.weight, new.bias = True, old.weight, old.bias
    return new.train(old.training)


def _refuse_lazy(module: nn.Module, path: str) -> None:
    if isinstance(module, LazyModuleMixin):
        raise ArgumentError(
            f"layer {path!r} ({type(module).__name__}) is lazy and does not know its channels yet: "
            "run the model once on a sample, then replace"
        )
