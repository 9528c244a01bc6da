"""From Poisson samples to tensors, workers and empty batches included."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from dpbam.params import map_rows
from support import poisson_batches, private_plan

X, Y = torch.arange(200.0).reshape(100, 2), torch.arange(100) % 3


class Pairs(Dataset[Any]):
    """A map-style data set: record i is (X[i], Y[i])."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return X[i], int(Y[i])


class Named(Pairs):
    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], int]:
        return {"x": X[i], "first": X[i, 0]}, int(Y[i])


class Whole:
    """Answers for a whole batch at once."""

    def __len__(self) -> int:
        return 100

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return X[indices], Y[indices]


SOURCES = [
    ((X, Y), 0), (TensorDataset(X, Y), 0), (Pairs(), 0), (Pairs(), 2), (Whole(), 0), (Whole(), 2),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "workers"), SOURCES)
def test_every_source_gives_the_samplers_records(dataset: Any, workers: int) -> None:
    plan = private_plan(batch_size=3, steps=15)
    expected = list(plan.sampler(seed=4))
    found = list(poisson_batches(plan, dataset, seed=4, num_workers=workers))
    assert [units.tolist() for _, _, units in found] == expected
    assert [] in expected  # an empty batch is there, and has the right shapes
    for (x, y, _), records in zip(found, expected, strict=True):
        assert torch.equal(x, X[records])
        assert torch.equal(y, Y[records])
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)


def test_inputs_may_be_dicts() -> None:
    plan = private_plan(batch_size=1, steps=12)
    for x, _, units in poisson_batches(plan, Named(), seed=1):
        assert torch.equal(x["x"], X[units])
        assert torch.equal(x["first"], X[units, 0])
    for x, _, units in poisson_batches(plan, ({"x": X}, Y), seed=1):
        assert torch.equal(x["x"], X[units])


def test_a_run_resumes_at_its_step() -> None:
    plan = private_plan()
    whole, resumed = (
        list(poisson_batches(plan, (X, Y), seed=1)),
        list(poisson_batches(plan, (X, Y), seed=1, start=7)),
    )
    assert len(resumed) == plan.steps - 7
    assert torch.equal(resumed[0][0], whole[7][0])


def test_unseeded_batches_differ() -> None:
    plan = private_plan(batch_size=50, steps=3)
    one, two = ([u.tolist() for *_, u in poisson_batches(plan, (X, Y))] for _ in range(2))
    assert one != two


# --- groups


OWNERS = [f"patient {i // 7}" for i in range(100)]  # 15 patients, up to 7 images each


@pytest.mark.parametrize("dataset", [(X, Y), Pairs()])
def test_groups_are_sampled_whole_and_within_the_cap(dataset: Any) -> None:
    plan = private_plan(n=15, batch_size=5, steps=30, unit="patient", max_records=3)
    sizes, patients = [], []
    for x, _, units in poisson_batches(plan, dataset, units=OWNERS, seed=2):
        records = (x[:, 0] / 2).long()
        owners = [OWNERS[int(r)] for r in records]
        assert len(set(records.tolist())) == len(records)
        by_unit = {int(u): {o for o, v in zip(owners, units, strict=True) if v == u} for u in units}
        assert all(len(names) == 1 for names in by_unit.values())  # a unit is one patient
        sizes += torch.bincount(units, minlength=15)[units.unique()].tolist()
        patients.append(len(units.unique()))
    assert set(sizes) == {2, 3}  # the last patient has two images
    assert 3 < sum(patients) / 30 < 7


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "dataset", "options", "error", "words"),
    [
        ({"n": 99}, (X, Y), {}, ValueError, r"plan is for n = 99 units .* data set has 100"),
        ({"n": 16, "unit": "patient"}, (X, Y), {"units": OWNERS}, ValueError, r"data set has 15"),
        ({"n": 15, "unit": "patient"}, (X, Y), {}, ValueError, r"pass units=, the patient"),
        ({}, (X, Y), {"units": OWNERS}, ValueError, r"the plan's unit is the record"),
        ({"n": 15, "unit": "patient"}, (X, Y), {"units": OWNERS[:9]}, ValueError,
         r"units has 9 entries for 100 records"),
        ({}, (X, Y, Y), {}, TypeError, r"\(inputs, targets\), got 3 parts"),
        ({}, (X, Y[:50]), {}, ValueError, r"same first axis"),
    ],
)  # fmt: skip
def test_a_data_set_that_is_not_the_plans_is_refused(
    changes, dataset, options, error, words
) -> None:
    fields = {"batch_size": 5, **changes}
    with pytest.raises(error, match=words):
        poisson_batches(private_plan(**fields), dataset, **options)


def test_a_shuffled_loader_is_refused() -> None:
    """Its batches are not Poisson, so that the plan's epsilon would not be theirs."""
    loader = DataLoader(Pairs(), batch_size=1, shuffle=True)
    with pytest.raises(TypeError, match=r"Poisson samples of its own, which a DataLoader cannot"):
        poisson_batches(private_plan(), loader)


def test_a_stream_of_records_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self):
            return iter([])

    with pytest.raises(TypeError, match="which a Stream cannot give: pass the data set itself"):
        poisson_batches(private_plan(), Stream())


def test_items_are_pairs() -> None:
    class Lonely(Pairs):
        def __getitem__(self, i: int) -> Tensor:
            return X[i]

    with pytest.raises(TypeError, match=r"items must be .input, target. pairs"):
        next(poisson_batches(private_plan(batch_size=50), Lonely()))


def test_a_weighted_sampler_is_refused_with_the_reason():
    from torch.utils.data import WeightedRandomSampler

    records = TensorDataset(torch.zeros(4, 2), torch.zeros(4))
    loader = DataLoader(records, sampler=WeightedRandomSampler([1.0, 1.0, 1.0, 9.0], 4))
    with pytest.raises(ValueError, match=r"one sampling rate: weight the loss instead"):
        poisson_batches(private_plan(n=4, batch_size=2), loader)


D = Pairs()
REPEATED = {
    "an index twice": (Subset(D, [*range(100), 0]), "rows 0 and 100 of the Subset"),
    "an index from the end": (Subset(D, torch.tensor([1, 99, -1])), "rows 1 and 2"),
    "all twice": (ConcatDataset([D, D]), "rows 0 and 100 of the ConcatDataset"),
    "one again": (ConcatDataset([Whole(), D, Subset(D, [7])]), "rows 107 and 200"),
    "nested": (Subset(ConcatDataset([Subset(D, [3, 4]), Subset(D, [4])]), [1, 2]), "rows 0 and 1"),
}  # fmt: skip


@pytest.mark.parametrize(("dataset", "where"), REPEATED.values(), ids=REPEATED)
def test_a_repeated_record_is_refused(dataset: Any, where: str) -> None:
    n = len(dataset)
    words = f"{where}.* are one record but two units.*: give each record once"
    with pytest.raises(ValueError, match=words):
        poisson_batches(private_plan(n=n, batch_size=1), dataset)
    with pytest.raises(ValueError, match=words):  # every copy an owner of its own
        poisson_batches(private_plan(n=n, batch_size=1, unit="patient"), dataset, units=range(n))


def test_a_repeated_record_of_one_owner_is_one_unit() -> None:
    plan = private_plan(n=2, batch_size=2, steps=1, unit="patient", max_records=3)
    ((x, _, units),) = poisson_batches(plan, Subset(D, [4, 5, 4]), units=["ann", "bob", "ann"])
    assert (x[:, 0].tolist(), units.tolist()) == ([8, 8, 10], [0, 0, 1])


def test_keys_that_are_no_numbers_are_compared_too() -> None:
    plan = private_plan(n=3, batch_size=1)
    poisson_batches(plan, ConcatDataset([Subset(D, ["a", "b"]), Subset(D, ["c"])]))
    with pytest.raises(ValueError, match="rows 0 and 2 of the ConcatDataset are one record"):
        poisson_batches(plan, ConcatDataset([Subset(D, ["a", "b"]), Subset(D, ["a"])]))


def test_parts_of_a_data_set_are_not_repeated() -> None:
    halves = ConcatDataset([Subset(D, range(50, 100)), Subset(D, range(-100, -50))])
    for dataset in (halves, ConcatDataset([Pairs(), Pairs()]), Subset(D, np.array([5, 3]))):
        poisson_batches(private_plan(n=len(dataset), batch_size=1), dataset)


PARTIAL = {
    "a subset": {"sampler": SubsetRandomSampler(range(80))},
    "of full length": {"sampler": SubsetRandomSampler([0] * 100)},
    "fewer": {"sampler": RandomSampler(D, num_samples=80)},
    "the first, twice": {"sampler": RandomSampler(range(50), num_samples=100)},
    "batches of some": {"batch_sampler": BatchSampler(SubsetRandomSampler(range(80)), 8, False)},
    "batches of one's own": {"batch_sampler": [[0, 1], [2]]},
}  # fmt: skip


@pytest.mark.parametrize("options", PARTIAL.values(), ids=PARTIAL)
def test_a_sampler_that_may_leave_records_out_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=r"may leave records .* pass torch.utils.data.Subset\("):
        poisson_batches(private_plan(), DataLoader(D, **options))


# --- items that are dicts, and the number of batches


class Dicts(Dataset):
    """Items as a tokenizer's: keyword arguments of the model, and labels."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: torch.tensor([float(i)]) for name in ("x", "mask")} | dict.fromkeys(
            self.names, i % 3
        )


@pytest.mark.parametrize("name", ["labels", "label", "targets", "target"])
def test_dict_items_are_keyword_arguments_and_a_target(name: str) -> None:
    plan = private_plan(n=12, batch_size=6, steps=2)
    for inputs, targets, units in poisson_batches(plan, Dicts(name), seed=0):
        assert list(inputs) == ["x", "mask"]
        assert torch.equal(inputs["x"][:, 0].long(), units)
        assert torch.equal(targets, units % 3)


@pytest.mark.parametrize("names", [(), ("label", "labels"), ("other",)])
def test_dict_items_without_one_target_are_refused(names: tuple[str, ...]) -> None:
    plan = private_plan(n=12, batch_size=6, steps=2)
    with pytest.raises(TypeError, match="one of them must be the target's"):
        next(poisson_batches(plan, Dicts(*names), seed=0))


def test_batches_count_down_to_the_end_of_the_plan() -> None:
    plan = private_plan(n=12, batch_size=6, steps=3)
    batches = poisson_batches(plan, Dicts("label"), seed=0, start=1)
    assert len(batches) == 2
    next(batches)
    assert len(batches) == 1
    assert len(list(batches)) == 1
    assert len(batches) == 0


def test_a_hugging_face_set_is_read_by_record_and_its_repeats_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    records = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    records = records.with_format("torch")
    plan = private_plan(batch_size=30, steps=2)
    inputs, targets, units = next(poisson_batches(plan, records))
    torch.testing.assert_close((inputs["x"], targets), (X[units], Y[units]))
    next(poisson_batches(plan, records.shuffle(seed=0)))
    with pytest.raises(ValueError, match="rows 0 and 1 of the Dataset are one record"):
        poisson_batches(plan, records.select([0, *range(99)]))


HUGGING_FACE_REPEATS = {  # each of 100 rows
    "selects, joined": lambda d, join: join([d.select(range(60)), d.select(range(50, 90))]),
    "lists, joined": lambda d, join: join([d.select([*range(0, 98, 2), 3]), d.select(range(50))]),
    "shuffled, joined": lambda d, join: join([d.shuffle(seed=0), d]).select(range(50, 150)),
    "torch's join": lambda d, _: ConcatDataset([d.select(range(60)), d.select(range(50, 90))]),
    "torch's join of lists": lambda d, _: ConcatDataset([d.select([0, 2, 4]), d.select(range(97))]),
    "columns": lambda d, join: join([d.select(range(50)), d.select(range(50)).add_column(
        "age", [1] * 50)]),
}  # fmt: skip


@pytest.mark.parametrize("repeat", HUGGING_FACE_REPEATS.values(), ids=HUGGING_FACE_REPEATS)
@pytest.mark.parametrize("saved", [False, True])
def test_selects_of_one_hugging_face_set_are_refused_where_they_overlap(
    repeat: Any, saved: bool, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    nulls = {"note": [None] * 100}
    records = datasets.Dataset.from_dict(nulls | {"x": X.tolist(), "label": Y.tolist()})
    if saved:
        records.save_to_disk(tmp_path / "saved")
        records = datasets.load_from_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"rows \d+ and \d+ of the \w+ are one record"):
        poisson_batches(private_plan(), repeat(records, datasets.concatenate_datasets))


def test_parts_of_a_hugging_face_set_are_not_repeated() -> None:
    datasets = pytest.importorskip("datasets")
    records = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    parts = [records.select(range(50, 100)), records.select(range(0, 50, 2)),
             records.filter(lambda row: False), records.select(range(1, 50, 2))]  # fmt: skip
    joined = datasets.concatenate_datasets(parts)
    same_values = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    several = datasets.concatenate_datasets([records, same_values])
    for dataset in (joined, joined.shuffle(seed=1), ConcatDataset(parts), several):
        poisson_batches(private_plan(n=len(dataset), batch_size=1), dataset)


def test_owners_of_several_columns_are_refused() -> None:
    plan = private_plan(n=50, batch_size=10, unit="patient", max_records=2)
    with pytest.raises(ValueError, match=r"shape \(100, 2\): name the owner of each record by one"):
        poisson_batches(plan, (X, Y), units=[("a", i // 2) for i in range(100)])


@pytest.mark.parametrize("missing", ["nan", "None", "<NA>", " "])
def test_a_missing_owner_as_text_is_refused(missing: str) -> None:
    owners = [missing if i < 2 else f"p{i // 2}" for i in range(100)]
    plan = private_plan(n=50, batch_size=10, unit="patient", max_records=2)
    with pytest.raises(ValueError, match="2 of 100 records have no unit of privacy, record 0"):
        poisson_batches(plan, (X, Y), units=owners)


def test_a_masked_owner_is_refused() -> None:
    owners = np.ma.masked_array(np.arange(100) // 2, mask=np.arange(100) == 7)
    plan = private_plan(n=50, batch_size=10, unit="patient", max_records=2)
    with pytest.raises(ValueError, match="1 of 100 records have no unit of privacy, record 7"):
        poisson_batches(plan, (X, Y), units=owners)


# --- the form of items


BUFFER = np.zeros(2, dtype=np.float32)


def in_the_buffer(i: int) -> np.ndarray:
    BUFFER[:] = i, -i
    return BUFFER


FORMS: dict[str, Any] = {
    "list": lambda i: [X[i], i],
    "float": lambda i: (X[i], i / 3),
    "bool": lambda i: (X[i], i > 50),
    "numpy": lambda i: (X[i].numpy(), np.int32(i)),
    "bfloat16": lambda i: (X[i].bfloat16(), i),
    "requires grad": lambda i: (X[i].clone().requires_grad_(), i),
    "conjugate": lambda i: (torch.complex(X[i], X[i]).conj(), i),
    "nested": lambda i: ({"x": [X[i], (i, 0.5)], "y": {"z": X[i, 0]}}, [i, i]),
    "keys in two orders": lambda i: (
        {"x": X[i], "y": i} if i % 2 else {"y": i, "x": X[i]}, torch.tensor(i)
    ),
    "numpy buffer": lambda i: (in_the_buffer(i), i),
    "torch buffer": lambda i: (torch.from_numpy(in_the_buffer(i)), i),
    "buffer in a dict": lambda i: ({"x": [in_the_buffer(i)]}, i),
}  # fmt: skip


class Formed(Pairs):
    def __init__(self, item: Any) -> None:
        self.item = item

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_item_is_collated_as_one_record_is(form: str) -> None:
    dataset = Formed(FORMS[form])
    inputs, targets, units = next(poisson_batches(private_plan(batch_size=20), dataset, seed=0))
    rows = [default_collate([dataset[i]]) for i in units.tolist()]
    expected = default_collate([map_rows(lambda t: t[0].detach().clone(), row) for row in rows])
    assert len(units) > 5
    torch.testing.assert_close([inputs, targets], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (([X[0], 1], 0.5), "float64 in one record and torch.int64"),
        (([X[0], True], 1), "bool in one record and torch.int64"),
        (([X[0, :1], 1], 1), "shape"),
        (([X[0].double(), 1], 1), "float64 in one record and torch.float32"),
        (([X[0]], 1), "other parts"),
        (({0: X[0], 1: 1}, 1), "other parts"),
    ],
)
def test_an_odd_item_is_refused_in_a_batch(odd: Any, words: str) -> None:
    """Record 97 is not among those that are looked at beforehand."""
    dataset = Formed(lambda i: odd if i == 97 else ([X[i], i], i))
    batches = poisson_batches(private_plan(batch_size=90, steps=20), dataset, seed=0)
    with pytest.raises(ValueError, match=words):
        list(batches)


def test_no_batch_is_kept_while_the_next_is_read() -> None:
    alive: list[Any] = []

    def item(i: int) -> Any:
        assert all(batch() is None for batch in alive)
        return X[i], i

    batches = poisson_batches(private_plan(batch_size=20), Formed(item), seed=0)
    alive.append(weakref.ref(next(batches)[0]))
    next(batches)
