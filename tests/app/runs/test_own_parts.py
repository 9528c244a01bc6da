"""Method, clipping and filter of the user's own, in runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbam.app.cli.flags import resumed_config
from dpbam.app.compare.comparison import Contender, plan_runs
from dpbam.app.report.records import read_run
from dpbam.app.runs import ConfigError, RunConfig, execute
from dpbam.app.runs.build import make_clipping, make_filter, make_method
from dpbam.contenders.clippings import QuantileClipping
from dpbam.contenders.disk import DiSK
from dpbam.filters import LowPass
from dpbam.methods import BAM

OWN = """
from dpbam.filters import Exponential
from dpbam.methods import Method
from dpbam.params import add
from dpbam.privacy.clipping import FlatClipping

class Descended(Method):
    remembers = 1
    def direction(self, grad, theta, lam):
        return grad(add(theta, grad(theta), -lam))

class Half(FlatClipping):
    def scales(self, norms):
        return super().scales(norms) / 2

class Slow(Exponential):
    def __init__(self, beta=0.5):
        super().__init__(beta)
"""
PARTS = {
    "method": "own_parts:Descended",
    "clipping": "own_parts:Half",
    "filter": "own_parts:Slow",
    "filter_options": {"beta": 0.3},
}


@pytest.fixture(autouse=True)
def own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_parts", raising=False)


def config(**changes: object) -> RunConfig:
    values = {
        "data": "digits", "model": "mlp", "noise_multiplier": 1.0, "epochs": 1.0, "seed": 3,
        "batch_size": 700, "engine": "functional", "physical_batch_size": 400, "accountant": "rdp",
    }  # fmt: skip
    return RunConfig(**{**values, **changes})


def test_own_parts_train_and_the_statement_says_whose_they_are(tmp_path: Path) -> None:
    result = execute(config(**PARTS), tmp_path / "run")
    assert result.steps == 2
    statement = json.loads((tmp_path / "run/privacy-statement.json").read_text())
    assert "method own_parts:Descended, clipping own_parts:Half" in statement["own_code"]
    assert "code of the user's own" in (tmp_path / "run/privacy-statement.md").read_text()
    assert read_run(tmp_path / "run").method == "own_parts:Descended"
    with pytest.raises(ConfigError, match="names code to run, own_parts:Half, as its clipping"):
        resumed_config(tmp_path / "run", {})
    named = {k: v for k, v in PARTS.items() if k != "filter_options"}
    again = execute(resumed_config(tmp_path / "run", named), tmp_path / "run", resume=True)
    assert again.score == result.score


def test_built_in_parts_take_their_options() -> None:
    made = config(clipping="quantile", clipping_options={"quantile": 0.7})
    clipping = make_clipping(made)
    assert isinstance(clipping, QuantileClipping)
    assert clipping.quantile == 0.7
    disk = make_method(config(method="disk", method_options={"kappa": 0.5, "inner": "bam"}), 10)
    assert isinstance(disk, DiSK)
    assert isinstance(disk.inner, BAM)
    assert isinstance(make_filter(config(filter="doppler", filter_options={"b": [1.0], "a": []})),
                      LowPass)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"filter": "own_parts:Half"}, "filter own_parts:Half cannot be made"),
        ({"filter": "own_parts:Method"}, "filter own_parts:Method is abstract"),
        ({"clipping": "psac", "clipping_options": {"q": 1}}, "unexpected keyword argument 'q'"),
        ({"method": "bm"}, "method 'bm' is unknown: did you mean 'bam'"),
        ({"method": ":x"}, "method ':x' is unknown"),
        (
            {"method": "disk", "method_options": {"inner": "own_parts:Descended"}},
            "inner must be dp-sgd or bam, got own_parts:Descended",
        ),
        ({"filter": "own_parts:add"}, "filter own_parts:add cannot be made"),
    ],
)
def test_what_is_not_such_a_part_is_refused_in_a_sentence(wrong: dict, said: str) -> None:
    def make() -> None:
        made = config(**wrong)
        make_method(made, 10)
        for part in (make_clipping, make_filter):
            part(made)

    with pytest.raises(ConfigError, match=said):
        make()


def test_contenders_may_differ_in_any_setting(tmp_path: Path) -> None:
    texts = [
        "dp-sgd",
        "own_parts:Descended:0.1",
        "bam:0.05,clipping=quantile,clipping-option=quantile=0.9",
    ]
    runs = plan_runs({"epsilon": 3.0}, [Contender.parse(t) for t in texts], [0], tmp_path)
    assert [run.arm for run in runs] == [
        "dp-sgd", "own_parts.Descended-0.1", "bam-0.05-quantile-quantile.0.9",
    ]  # fmt: skip
    assert runs[1].config.method == "own_parts:Descended"
    assert runs[2].config.clipping_options == {"quantile": 0.9}
    with pytest.raises(ConfigError, match="clippping is unknown: did you mean 'clipping'"):
        plan_runs({"epsilon": 3.0}, [Contender.parse("bam,clippping=psac")], [0], tmp_path)
