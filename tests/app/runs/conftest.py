import pytest

from dpbam.app.audit import accountant
from dpbam.app.runs import RunConfig


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second accountant on a coarser grid: a wider bracket, sooner."""
    monkeypatch.setattr(accountant, "_POINTS", 2**15)


@pytest.fixture(scope="session")
def tiny() -> RunConfig:
    """A run of eight steps that takes a quarter of a second."""
    return RunConfig(
        model="mlp", model_options={"hidden": [8]}, method="dp-sgd", noise_multiplier=4.0,
        accountant="rdp", delta=1e-4, batch_size=180, epochs=1, lr=0.02, checkpoint_every=0,
        num_workers=0, seed=5,
    )  # fmt: skip
