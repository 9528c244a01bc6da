"""Groups of test records, so that a record of a run says whom a model serves badly.

A recipe names a function, ``groups = "reproduce.groups:cifar10_8x8"``, that returns masks of the
test records by name. Of each finished run the accuracy in each group is kept, by the last weights
and by the averaged ones.

**Hard records** are, within each class, the half of the test records to whose true class a
reference model gives the lowest probabilities. The reference is trained without privacy on the
complete training set, so that hard and rare are two things.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray

from dpbam.app.runs import ConfigError
from dpbam.data import DataSet, data_root
from dpbam.nn import build_model
from dpbam.training.evaluation import predict_logits
from reproduce import small_data

Mask = NDArray[np.bool_]
_FORMAT = 1  # of the cached reference: raise it when its training changes
_EPOCHS, _BATCH, _RATE = 6, 250, 0.002


def load_groups(name: str) -> dict[str, Mask]:
    """Call ``module:function`` and return its masks of the test records."""
    module, _, function = name.partition(":")
    try:
        define: Callable[[], Mapping[str, Mask]] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError):
        raise ConfigError(f"the groups {name!r} are not module:function of masks") from None
    return dict(define())


def accuracies(
    logits: torch.Tensor, labels: torch.Tensor, groups: Mapping[str, Mask]
) -> dict[str, float]:
    """Return the share of right predictions in each group."""
    is_right = (logits.argmax(1) == labels).numpy()
    return {name: float(is_right[mask].mean()) for name, mask in groups.items()}


def cifar10_8x8() -> dict[str, Mask]:
    """Return the ten classes, the rare and frequent ones, and the hard and easy half of each."""
    test = small_data.cifar10_8x8("test")
    labels = np.asarray(test.labels)
    is_rare = np.isin(labels, small_data.RARE)
    is_hard = lowest_half(reference_confidence(), labels)
    return {
        **{f"class {name}": labels == k for k, name in enumerate(test.class_names)},
        "rare": is_rare, "frequent": ~is_rare, "hard": is_hard, "easy": ~is_hard,
        "rare and hard": is_rare & is_hard,
    }  # fmt: skip


def lowest_half(confidence: NDArray[np.float32], labels: NDArray[np.int64]) -> Mask:
    """Return, within each class, which half of the records has the lowest confidence.

    Example:
        >>> lowest_half(np.array([0.9, 0.1, 0.3, 0.2]), np.array([0, 0, 1, 1])).tolist()
        [False, True, False, True]
    """
    is_low = np.zeros(len(labels), dtype=bool)
    for k in np.unique(labels):
        where = np.flatnonzero(labels == k)
        order = np.argsort(confidence[where], kind="stable")
        is_low[where[order[: len(where) // 2]]] = True
    return is_low


def reference_confidence() -> NDArray[np.float32]:
    """Return the reference's probability of the true class of each test record; trained once."""
    train, test = small_data.cifar10_8x8("train"), small_data.cifar10_8x8("test")
    facts = f"{_FORMAT} {_EPOCHS} {_BATCH} {_RATE} {train.fingerprint()} {test.fingerprint()}"
    path = data_root() / f"reference-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.npy"
    if not path.exists():
        logits, labels = predict_logits(_train_reference(train), test)
        probabilities = logits.softmax(1)[torch.arange(len(labels)), labels]
        temporary = path.with_suffix(f".{os.getpid()}.npy")
        np.save(temporary, probabilities.numpy())
        temporary.rename(path)
    confidence: NDArray[np.float32] = np.load(path, allow_pickle=False)
    return confidence


def _train_reference(train: DataSet) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = build_model(
        "small-cnn", in_channels=3, image_size=8, num_classes=10, seed=0, channels=[32, 64, 64]
    )
    images, labels = train.batch(np.arange(len(train)))
    inputs = images.float() / 127.5 - 1
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    for _ in range(_EPOCHS):
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model
