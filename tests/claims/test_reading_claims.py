"""What is read of a record is the same whether another one is in its batch or not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from dpbam import loading, reading
from dpbam.errors import ArgumentError
from dpbam.loading import PoissonBatches
from dpbam.params import map_rows
from dpbam.privacy.randomness import Randomness
from dpbam.reading import Join, OneByOne, isolated, keyed
from planting import Mistake, catches
from support import clipped_sum, cross_entropy, private_plan, samples, sized_oracle, smooth_net

N = 100


class Augmented(Dataset[Any]):
    """Draws from every global generator, and how often depends on the record."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        for _ in range(i % 3):
            torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
        drawn = [torch.rand(1).item(), np.random.rand(), random.random()]  # noqa: NPY002
        return torch.tensor([float(i), *drawn]), i


def mixup(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return (x + x.roll(1, 0)) / 2, y


# --- the claims


def check_the_draws_of_a_record_are_its_own() -> None:
    """Under a seed that is known, of torch's generator and of the oracle's."""
    together, without = (read(range(start, N, 2)) for start in (0, 2))
    assert torch.equal(together[1:], without)
    assert len(set(together[:, 1].tolist())) == N // 2  # random all the same


def check_the_draws_change_from_step_to_step() -> None:
    first, second = (read(range(N), step=step) for step in (0, 1))
    assert not (first[:, 1:] == second[:, 1:]).any()


class Peeking(Dataset[Any]):
    """Derives draws from torch's seed, which it does not move; record 7 draws as usual."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i == 7:
            return torch.rand(1), i
        return torch.tensor([(torch.initial_seed() + i) % 1009 / 1009]), i


def check_a_record_that_draws_changes_no_seed_of_others() -> None:
    def row_of_3(others: list[int]) -> float:
        alone, join = isolated(Peeking())
        x, _ = join(alone.__getitems__([(record, 100 + record) for record in (3, *others)]))
        return float(x[0])

    assert row_of_3([4]) == row_of_3([7])


def test_a_record_that_draws_changes_no_seed_of_others() -> None:
    check_a_record_that_draws_changes_no_seed_of_others()


def check_the_collate_function_sees_one_record() -> None:
    together, without = (read(range(start, N), mixup) for start in (0, 1))
    assert torch.equal(together[1:], without)
    assert together[:, 0].tolist() == list(range(N))


def check_reading_leaves_the_generators_alone() -> None:
    seed_all()
    usual = torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002
    seed_all()
    OneByOne(Augmented())[3, 4]
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == usual  # noqa: NPY002


def check_a_record_is_one_unit_in_any_wrapping() -> None:
    """Record 0 leaves, at q = 1; let through, it would move the sum by 5 C and by 3 C."""
    x, y = samples(20)
    x[0] = 50
    base = TensorDataset(x, y)
    for dataset in (Subset(base, [*range(20), 0, 0, 0, 0]), ConcatDataset([base] * 3)):
        n = len(dataset)
        plan = private_plan(n=n, batch_size=n, steps=1)
        oracle = sized_oracle(smooth_net(), lambda z, t: 100 * cross_entropy(z, t), plan)
        try:
            x, y, units = next(oracle.batches(dataset))
        except ArgumentError:
            continue
        rest = x[:, 0] != 50
        without = clipped_sum(oracle, x[rest], y[rest], units[rest])
        assert (clipped_sum(oracle, x, y, units) - without).norm() <= plan.clip_norm * (1 + 1e-6)


def read(records: range, collate: Any = default_collate, step: int = 0) -> Tensor:
    """The inputs of a step that draws ``records``, in a script that seeds everything."""
    seed_all()
    alone = OneByOne(Augmented(), collate)
    x, _ = Join(alone[0, 0])(
        alone.__getitems__(keyed(torch.tensor(records), Randomness(seed=5), step))
    )
    return x


def seed_all() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


# --- the mistakes


def from_one_stream(real: Any) -> Any:
    return lambda self, drawn: (self._dataset[record] for record, _ in drawn)


def all_at_once(real: Any) -> Any:
    def read(self: Any, drawn: Any) -> list[Any]:
        batch = self._collate([self._dataset[record] for record, _ in drawn])
        return [map_rows(lambda t, k=k: t[k : k + 1], batch) for k in range(len(drawn))]

    return read


def same_in_every_step(real: Any) -> Any:
    return lambda self, name, step, ids: real(self, name, 0, ids)


def let_through(real: Any) -> Any:
    return lambda dataset, units=None: None


def never_moved(real: Any) -> Any:
    return dict


MISTAKES = {
    "draws that go unnoticed": Mistake(
        check_the_draws_of_a_record_are_its_own, reading, "_positions", never_moved
    ),
    "one stream for all records": Mistake(
        check_the_draws_of_a_record_are_its_own, OneByOne, "_items", from_one_stream
    ),
    "a seed that only some batches have": Mistake(
        check_a_record_that_draws_changes_no_seed_of_others,
        reading,
        "_same_rows",
        lambda real: lambda rows, others: True,
    ),
    "one key for all steps": Mistake(
        check_the_draws_change_from_step_to_step, Randomness, "keys", same_in_every_step
    ),
    "whole batches are collated": Mistake(
        check_the_collate_function_sees_one_record, OneByOne, "__getitems__", all_at_once
    ),
    "the generators move on": Mistake(
        check_reading_leaves_the_generators_alone, OneByOne, "rows", all_at_once
    ),
    "a record in several rows": Mistake(
        check_a_record_is_one_unit_in_any_wrapping, loading, "refuse_repeated", let_through
    ),
}


@catches(MISTAKES)
def test_planted_mistakes_are_caught(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)


class OneBatch:
    """A sampler of one step that takes these records."""

    start, steps = 0, 1

    def __init__(self, records: Any) -> None:
        self.randomness, self._records = Randomness(seed=5), records

    def __len__(self) -> int:
        return self.steps

    def indices(self, step: int) -> Any:
        return self._records


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plans_batches_are_read_so(workers: int) -> None:
    def batch_of(records: range) -> Tensor:
        seed_all()
        sampler: Any = OneBatch(np.array(records))
        plan = private_plan(n=N, batch_size=50, steps=5)
        ((x, _, _),) = PoissonBatches(plan, Augmented(), sampler, num_workers=workers)
        return x

    assert torch.equal(batch_of(range(0, N, 2))[1:], batch_of(range(2, N, 2)))
    assert torch.equal(batch_of(range(N)), read(range(N)))


# --- what is refused


class Flipping(Augmented):
    """Has a generator of its own, seeded by its author, and draws one bit."""

    def __init__(self, seed: int) -> None:
        self.own = np.random.default_rng(seed)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([self.own.random() < 0.5]), i


def test_a_data_set_with_a_state_is_refused() -> None:
    for seed in range(20):
        with pytest.raises(ValueError, match=r"read twice.*keeps a state.*use augment"):
            isolated(Flipping(seed))
    isolated(Augmented())


def test_several_rows_of_one_record_are_refused() -> None:
    def crops(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return torch.cat([x, x]), torch.cat([y, y])

    with pytest.raises(ValueError, match="made 2 rows of one record, and each would count"):
        isolated(Augmented(), crops)


class Table(Dataset[Any]):
    """Records as they may come from a file; number 1 is another's."""

    def __init__(self, odd: Any) -> None:
        self.usual: dict[str, Any] = {"a": torch.zeros(2), "b": torch.ones(2)}
        self.odd = odd

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return self.odd if i == 1 else self.usual


def test_a_record_does_not_decide_the_order_of_parts() -> None:
    alone, join = isolated(Table({"b": torch.ones(2), "a": torch.zeros(2)}))
    batch = join([alone[i, 0] for i in (1, 0, 2)])
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([[0.0, 0.0]] * 3, [[1.0, 1.0]] * 3)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"a": torch.zeros(2), "c": torch.ones(2)}, "has other parts than record 0"),
        ({"a": torch.zeros(2)}, "has other parts than record 0"),
        ({"a": torch.zeros(2), "b": torch.ones(2).long()}, "b is torch.int64 in one record"),
        ({"a": torch.zeros(2), "b": torch.ones(3)}, r"b has shape \(3,\) in one record and \(2,\)"),
    ],
)
def test_a_record_does_not_decide_names_types_or_shapes(odd: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        isolated(Table(odd))


def test_a_part_that_one_record_leaves_out_is_refused() -> None:
    def collate(items: list[Any]) -> Any:
        batch = default_collate(items)
        return {"a": batch["a"], "mask": None if batch["a"].any() else batch["b"]}

    with pytest.raises(
        ValueError, match=r"mask is None in one record and torch\.float32 in record 0"
    ):
        isolated(Table({"a": torch.ones(2), "b": torch.ones(2)}), collate)


def test_a_buffer_may_be_used_again() -> None:
    buffer = torch.zeros(1, 1)
    alone = OneByOne(range(9), lambda items: buffer.fill_(items[0]))
    assert torch.cat(alone.rows([(k, 0) for k in (1, 2, 8)])).tolist() == [[1], [2], [8]]
