import pytest
import torch
from torch import nn

from dpbam.app.runs import RunError
from dpbam.app.runs.checkpoint import listed, load_latest, save


def state(step: int, *, optimizer: str = "NAdam", history: bool = True):
    """What a trainer would hand over after a step of a small model."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    released = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    return {
        "model": model.state_dict(),
        "optimizer": made.state_dict(),
        "oracle": {
            "step": step,
            "parts": {"clipping/sensitivity": torch.tensor(0.1, dtype=torch.float64)}
            | {f"history/0/gradient/{n}": g for n, g in released.items() if history},
        },
        "average": released,
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("optimizer", ["NAdam", "SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("history", [True, False])
def test_everything_comes_back_bit_by_bit_and_in_order(tmp_path, optimizer, history):
    saved = state(7, optimizer=optimizer, history=history)
    save(tmp_path / "c", saved, "r")
    loaded = load_latest(tmp_path / "c", "r")
    for part in saved:
        assert same(saved[part], loaded[part]), part


def test_the_last_two_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, state(step), "r")
    assert [p.name[:13] for p in listed(tmp_path)] == ["step-00000003", "step-00000004"]
    assert load_latest(tmp_path, "r")["oracle"]["step"] == 4


def test_a_later_one_of_an_abandoned_past_is_removed(tmp_path):
    for step in (3, 4, 2):
        save(tmp_path, state(step), "r")
    assert load_latest(tmp_path, "r")["oracle"]["step"] == 2


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_a_damaged_one_is_named_with_the_way_out(tmp_path, harm):
    save(tmp_path, state(1), "r")
    path = save(tmp_path, state(2), "r")
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes({"cut": raw[:100], "flip": raw, "empty": b""}[harm])
    with pytest.raises(RunError, match=rf"{path.name} is damaged: delete it, and resume .* step 1"):
        load_latest(tmp_path, "r")
    path.unlink()
    assert load_latest(tmp_path, "r")["oracle"]["step"] == 1


def test_one_of_another_run_is_refused(tmp_path):
    save(tmp_path, state(1), "r")
    with pytest.raises(RunError, match="belongs to another run"):
        load_latest(tmp_path, "other")


def test_none_yet(tmp_path):
    assert load_latest(tmp_path / "none", "r") is None
