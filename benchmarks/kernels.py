"""Kernels and host reads of one private step: what a GPU will feel.

Every operation below autograd counts as one kernel, except views and allocations. A host read is an
operation whose result the processor has to wait for: ``_local_scalar_dense``, ``nonzero``,
``equal``, an index by booleans, and ``tolist``, ``numpy``, ``cpu`` of any tensor. The count is of
the second ``backward`` of an oracle, noise included; drawing and scaling noise in NumPy counts as
two kernels.

    python benchmarks/kernels.py [--nets convolutions lstm] [--where]

``--where`` prints the lines of the package from which the kernels and reads come.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nets import loss, make
from steps import opacus_step, private_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpbam import params

ROWS = {"convolutions": 64, "resnet9": 16, "vit": 8, "lstm": 16}
PRIVATE = [(e, m) for e in ("fused", "functional") for m in ("dp-sgd", "bam", "bam-exact")]
OPACUS = ("hooks", "functorch", "ghost")
IN_NUMPY = 2  # kernels: the noise is drawn, and scaled

_VIEWS = {"_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "detach", "alias", "unsqueeze_",
          "squeeze_", "transpose_", "t_", "resize_"}  # fmt: skip
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount",
          "_unique2", "unique_consecutive", "unique_dim"}  # fmt: skip
_TO_HOST = ("tolist", "numpy", "__array__", "cpu")


class Kernels(TorchDispatchMode):
    """Count the kernels and host reads of a block, and the lines from which they come."""

    def __init__(self, *, where: bool = False) -> None:
        super().__init__()
        self.kernels, self.reads = 0, 0
        self.names: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.read_places: Counter[str] = Counter()
        self._where = where

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import its compiler

    def __enter__(self) -> Kernels:
        # On a processor NumPy adds the sums, and large operations run in slices that stay in its
        # cache; what counts is what a device would do.
        params.on_processor, self._on_processor = lambda tensors: False, params.on_processor
        for name in _TO_HOST:
            setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        params.on_processor = self._on_processor
        for name in _TO_HOST:
            if name == "__array__":
                Tensor.__array__ = Tensor.__array__.__wrapped__
            else:
                delattr(Tensor, name)  # it is TensorBase's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not (func.is_view or name in _VIEWS or name in _ALLOCATIONS):
            self.kernels += 1
            self.names[name] += 1
            if self._where:
                self.places[_place()] += 1
        if name in _READS or _by_booleans(name, args):
            self._read()
        return func(*args, **(kwargs or {}))

    def _counted(self, name: str, method: Any) -> Any:
        def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype != torch.uint8:  # the state of the processor's generator: no device
                self._read()
            return method(tensor, *args, **kwargs)

        run.__name__, run.__wrapped__ = name, method  # type: ignore[attr-defined]
        return run

    def _read(self) -> None:
        self.reads += 1
        if self._where:
            self.read_places[_place()] += 1


def _by_booleans(name: str, args: Any) -> bool:
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    return any(i is not None and i.dtype == torch.bool for i in indices)


def _place() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "dpbam" in name and "benchmarks" not in name:
            return f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def plain_step(name: str, rows: int) -> Callable[[], None]:
    model, x, y = make(name, rows)

    def run() -> None:
        model.zero_grad()
        loss(model(x), y).sum().backward()

    return run


def counted(run: Callable[[], None], *, private: bool = True, where: bool = False) -> Kernels:
    with Kernels(where=where) as count:
        run()
    count.kernels += IN_NUMPY if private else 0
    return count


def rows_of(name: str) -> dict[str, Callable[[], Kernels]]:
    """Return the counts of one net by the name of the step, each computed on call."""
    rows = ROWS[name]
    found = {
        f"{engine} {method}": partial(_private, engine, method, name, rows)
        for engine, method in PRIVATE
    }
    found |= {f"opacus {mode}": partial(_opacus, mode, name, rows) for mode in OPACUS}
    return found


def _private(engine: str, method: str, name: str, rows: int, where: bool) -> Kernels:
    return counted(private_step(engine, method, name, rows), where=where)


def _opacus(mode: str, name: str, rows: int, where: bool) -> Kernels:
    run = opacus_step(mode, *make(name, rows), noise=1.0)
    run()
    return counted(run, private=False, where=where)


def show(name: str, *, where: bool) -> None:
    run = plain_step(name, ROWS[name])
    run()
    plain = counted(run, private=False).kernels
    print(f"\n| {name}, {ROWS[name]} rows | kernels | over plain | host reads |\n|---|---|---|---|")
    print(f"| plain forward and backward | {plain:,} | 1 | 0 |")
    for step, count in rows_of(name).items():
        try:
            found = count(where)
        except Exception as error:
            print(f"| {step} | {type(error).__name__}: {str(error)[:60]} | | |")
            continue
        print(f"| {step} | {found.kernels:,} | {found.kernels / plain:.1f} | {found.reads} |",
              flush=True)  # fmt: skip
        for title, places in (("kernels", found.places), ("reads", found.read_places)):
            for place, count_there in places.most_common(40 if where else 0):
                print(f"    {title} {count_there:5d} {place}")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--where", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.nets:
        show(name, where=options.where)


if __name__ == "__main__":
    main()
