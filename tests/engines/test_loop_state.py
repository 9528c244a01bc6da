"""What a forward pass leaves behind is refused by the loop engine, by name."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import make_batch
from torch import Tensor, nn

from dpbam.engines import LoopEngine, StatefulModelError
from dpbam.engines.state import snapshot_code
from dpbam.methods import BAM, DPSGD

MEMORY: list[Tensor] = []
NUMBERS: dict[str, float] = {}
CONSTANT = torch.ones(3)
FAR_AWAY = array.array("d", [0.0])  # an object of the standard library: not looked into


@dataclasses.dataclass(slots=True)
class Slots:
    largest: float = 0.0


class Options(dict[str, float]):
    largest = 0.0


SLOTS, OPTIONS = Slots(), Options()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


class Base(nn.Module):
    """Leaves nothing behind; a subclass says what to leave of x."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("unsaved", torch.zeros(4), persistent=False)
        self.items: list[Any] = [[]]
        self.queue: collections.deque[Any] = collections.deque(maxlen=2)
        self.table = np.zeros(3)
        self.setup()

    def setup(self) -> None:
        return None

    def leave(self, x: Tensor) -> None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        self.leave(x)
        return self.head(x)


class BufferReplaced(Base):
    def leave(self, x: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)


class BufferWritten(Base):
    def leave(self, x: Tensor) -> None:
        self.unsaved.add_(x.detach().mean(0))


class BufferData(Base):
    def leave(self, x: Tensor) -> None:
        self.mean.data.add_(x.detach().mean(0))


class Attribute(Base):
    def leave(self, x: Tensor) -> None:
        self.last = float(x.sum())


class TensorAttribute(Base):
    def leave(self, x: Tensor) -> None:
        self.last = x


class NestedList(Base):
    def leave(self, x: Tensor) -> None:
        self.items[0].append(float(x.sum()))


class FullQueue(Base):
    """Its length does not change."""

    def setup(self) -> None:
        self.queue.extend([0.0, 0.0])

    def leave(self, x: Tensor) -> None:
        self.queue.append(float(x.sum()))


class NumpyArray(Base):
    def leave(self, x: Tensor) -> None:
        self.table[0] += float(x.sum())


class ClassAttribute(Base):
    seen = 0.0

    def leave(self, x: Tensor) -> None:
        type(self).seen = float(x.sum())


class GlobalNumber(Base):
    def leave(self, x: Tensor) -> None:
        NUMBERS.setdefault("first", float(x.sum()))


class GlobalInFunction(Base):
    def leave(self, x: Tensor) -> None:
        remember(x)


def remember(x: Tensor) -> None:
    NUMBERS["through a function"] = float(x.sum())


class GlobalTensor(Base):
    def leave(self, x: Tensor) -> None:
        MEMORY.append(x * 2)


class HookClosure(Base):
    def setup(self) -> None:
        last: list[float] = []
        self.head.register_forward_hook(
            lambda module, args, y: last.append(float(y.detach().sum()))
        )


class OriginalByClosure(Base):
    """The hook of a copy writes to the model that it was copied from."""

    def setup(self) -> None:
        def keep(module: nn.Module, args: Any, y: Tensor) -> None:
            self.features = float(y.detach().sum())

        self.head.register_forward_hook(keep)


class Holder:
    def __init__(self) -> None:
        self.total = 0.0


class PlainObject(Base):
    def setup(self) -> None:
        self.holder = Holder()

    def leave(self, x: Tensor) -> None:
        self.holder.total += float(x.sum())


class ParameterWritten(Base):
    def leave(self, x: Tensor) -> None:
        self.head.weight.data.mul_(1 + x.detach().abs().mean())


class FrozenParameterWritten(Base):
    def setup(self) -> None:
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def leave(self, x: Tensor) -> None:
        self.scale.data.copy_(x.detach().mean().reshape(1))


class ParameterAttribute(Base):
    def setup(self) -> None:
        self.head.weight.largest = 0.0

    def leave(self, x: Tensor) -> None:
        self.head.weight.largest = float(x.max())


class GlobalTensorAttribute(Base):
    def leave(self, x: Tensor) -> None:
        CONSTANT.largest = float(x.max())  # type: ignore[attr-defined]


class SlotOfGlobal(Base):
    def leave(self, x: Tensor) -> None:
        SLOTS.largest = float(x.max())


class AttributeOfDict(Base):
    def leave(self, x: Tensor) -> None:
        OPTIONS.largest = float(x.max())


class GlobalInNestedFunction(Base):
    def leave(self, x: Tensor) -> None:
        def remember() -> None:
            NUMBERS["largest"] = float(x.max())

        remember()


NAMES: dict[type[Base], str] = {
    ParameterAttribute: "parameter 'weight' of module 'head' \\(Linear\\)\\[largest",
    GlobalTensorAttribute: "global CONSTANT\\]\\[largest",
    SlotOfGlobal: "global SLOTS\\]\\[largest",
    AttributeOfDict: "global OPTIONS\\]\\[largest",
    GlobalInNestedFunction: "global NUMBERS",
    BufferReplaced: "buffer 'mean' of module ''",
    BufferWritten: "buffer 'unsaved' of module ''",
    BufferData: "buffer 'mean' of module ''",
    Attribute: "attribute 'last' of module ''",
    TensorAttribute: "attribute 'last' of module ''",
    NestedList: "attribute 'items' of module ''",
    FullQueue: "attribute 'queue' of module ''",
    NumpyArray: "attribute 'table' of module ''",
    ClassAttribute: "ClassAttribute.seen",
    GlobalNumber: "global NUMBERS",
    GlobalInFunction: "global NUMBERS",
    GlobalTensor: "a tensor of shape \\(1, 4\\)",
    HookClosure: "closure variable last",
    OriginalByClosure: "closure variable self\\]\\[features",
    PlainObject: "attribute 'holder' of module ''",
    ParameterWritten: "'weight'",
    FrozenParameterWritten: "'scale'",
}


def directions(model: nn.Module, method: Any = None, of: Any = loss) -> Any:
    x = torch.randn(3, 4) + 1
    batch = make_batch(x, torch.arange(3), 3)
    return LoopEngine(model, of).directions(batch, method or DPSGD(), 0.1)


@pytest.mark.parametrize("kind", NAMES)
def test_state_is_refused_by_name(kind: type[Base]) -> None:
    MEMORY.clear()
    NUMBERS.clear()
    model = kind()
    theta = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    with pytest.raises(StatefulModelError, match=NAMES[kind]):
        directions(model)
    MEMORY.clear()
    NUMBERS.clear()
    now = [p for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(theta, now, strict=True))


class OutOfSight(Base):
    """A number where nothing looks; only the second look at the first record sees it."""

    def forward(self, x: Tensor) -> Tensor:
        FAR_AWAY[0] += 1.0
        return self.head(x) * FAR_AWAY[0]


def test_hidden_state_is_detected_by_repeating_the_first_loss() -> None:
    with pytest.raises(StatefulModelError, match="before the others"):
        directions(OutOfSight())


def test_a_loss_that_keeps_state_is_refused() -> None:
    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("level", torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.level += 1.0
            return loss(output, target)

    with pytest.raises(StatefulModelError, match="buffer 'level' of the loss's module"):
        directions(Base(), of=Smoothed())

    total = [0.0]

    def closure(output: Tensor, target: Tensor) -> Tensor:
        total[0] += float(output.detach().sum())
        return loss(output, target)

    with pytest.raises(StatefulModelError, match="closure variable total of the loss"):
        directions(Base(), of=closure)


def test_constant_cached_on_first_use_is_supported() -> None:
    """A mask by length, kept by a function: computed from no record."""

    class Cached(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * weights(x.shape[1]))

    directions(Cached())
    assert weights.cache_info().currsize == 1


@functools.lru_cache
def weights(n: int) -> Tensor:
    return torch.arange(n) / n


def test_stateless_models_are_supported() -> None:
    for method in (DPSGD(), BAM(0.1), BAM(0.1, exact=True)):
        assert directions(Base(), method).norms().isfinite().all()


def test_model_that_cannot_be_copied_is_refused_with_the_reason() -> None:
    model = Base()
    model.lock = (line for line in ())  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"copy\.deepcopy fails"):
        directions(model)


def test_unchanged_surroundings_are_accepted() -> None:
    """Also where objects come and go in between, whose ids are used again."""

    class Defaults(Base):
        def other(self, a: int = 1, b: float = 2.0, *, c: str = "c") -> None:
            return None

    model = Defaults()
    for _ in range(100):
        watched = snapshot_code(model, loss)
        assert [(k,) for k in range(50)]
        watched.check()
