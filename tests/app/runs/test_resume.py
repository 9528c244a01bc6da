"""What a resumed run may change, and what it is refused."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from dpbam.app.runs import (
    Budget,
    RunError,
    RunFolder,
    checkpoint,
    execute,
    execution,
    prepare,
    stored_config,
)
from dpbam.app.runs.budget import by_kind
from dpbam.app.runs.documents import Statement
from dpbam.app.runs.execution import _Session
from dpbam.app.runs.statement_check import check_statement
from dpbam.contenders.clippings import AdaptiveClipping
from dpbam.contenders.disk import KalmanStep
from dpbam.distributed import Ranks
from dpbam.filters import LowPass
from dpbam.oracle import PrivateGradientOracle
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.rounding import up
from dpbam.training.events import Reporter
from dpbam.training.trainer import Trainer


def begin(config, out):
    """Start a run that dies at its fifth step."""
    real = GaussianNoise.add

    def add(self, sums, std, at, **more):
        if at == 4:
            raise RuntimeError("dead")
        return real(self, sums, std, at, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GaussianNoise, "add", add)
        with pytest.raises(RuntimeError, match="dead"):
            execute(config, out)
    return out


@pytest.fixture(scope="module")
def dead(tiny, tmp_path_factory):
    """The folder of a run that died, for tests to copy."""
    return begin(tiny, tmp_path_factory.mktemp("dead") / "run")


@pytest.fixture
def begun(tiny, dead, tmp_path):
    """Gives the folder of a run that died at its fifth step."""

    def found(**changes):
        out = tmp_path / "run"
        return begin(tiny.replace(**changes), out) if changes else shutil.copytree(dead, out)

    return found


def resume(out, **changes):
    return execute(stored_config(out).replace(**changes), out, resume=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": 1.0}, {"clip_norm": 2.0}, {"batch_size": 90}, {"seed": 6},
        {"seed": None}, {"method": "bam"}, {"delta": 1e-3}, {"lr": 0.5}, {"clipping": "automatic"},
        {"accountant": "pld"}, {"optimizer": "sgd"}, {"budget": "other.json"}, {"ema": 0.9},
        {"device": "cuda"}, {"physical_batch_size": 7}, {"engine": "functional"},
        {"data": "cifar10"}, {"model_options": {"hidden": [9]}}, {"augment_multiplicity": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_accountant_was_told_cannot_change(begun, changes):
    out = begun()
    before = (out / "ledger.jsonl").read_bytes()
    (name,) = changes
    with pytest.raises(RunError, match=f"{name} was .* when the run began and cannot become"):
        resume(out, **changes)
    assert (out / "ledger.jsonl").read_bytes() == before


def die_after_charging(config, out, step):
    """Start a run whose process dies when ``step`` is on the ledger and in no checkpoint."""
    real = PrivateGradientOracle._write

    def write(self, released, parameters):
        if self.step == step + 1:
            raise RuntimeError("dead")
        real(self, released, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateGradientOracle, "_write", write)
        with pytest.raises(RuntimeError, match="dead"):
            execute(config, out)


class Messages(Reporter):
    def __init__(self):
        self.messages = []

    def on_message(self, message):
        self.messages.append(message)


def resumed_after_a_crash(config, out):
    """Lose four of eight steps, and return what the resumed run says, and its result."""
    die_after_charging(config.replace(checkpoint_every=3600.0), out, 4)
    heard = Messages()
    result = execute(stored_config(out), out, resume=True, reporter=heard)
    return heard.messages, result


def test_the_first_checkpoint_comes_after_a_tenth_of_the_steps(tiny, tmp_path):
    die_after_charging(tiny.replace(checkpoint_every=3600.0), tmp_path / "run", 4)
    (saved,) = checkpoint.listed(tmp_path / "run" / "checkpoints")
    assert saved.name.startswith("step-00000001.")


def test_the_first_checkpoint_comes_after_a_minute(tiny, tmp_path, monkeypatch):
    config = tiny.replace(checkpoint_every=3600.0, epochs=30)
    session = _Session(RunFolder(tmp_path), {}, prepare(config), Reporter(), Ranks())
    session._saved = (0.0, -1)  # differences of large numbers would round
    due = []
    for seconds, first in ((59, True), (60, True), (60, False), (3600, False)):
        monkeypatch.setattr(execution.time, "monotonic", lambda at=seconds: float(at))
        session._has_checkpoint = not first
        due.append(session._is_due(step=3))
    assert due == [False, True, False, True]


@pytest.mark.parametrize(("saving", "every"), [(0.0, 1), (0.2, 20), (5.0, 60)])
def test_by_default_checkpoints_take_a_hundredth_of_the_time(
    tiny, tmp_path, monkeypatch, saving, every
):
    """A crash of a short run then loses seconds, not a minute, and all lost steps are paid for."""
    config = tiny.replace(checkpoint_every=None, epochs=30)
    session = _Session(RunFolder(tmp_path), {}, prepare(config), Reporter(), Ranks())
    session._saved, session._has_checkpoint = (0.0, 1), True
    session._saving_seconds = saving
    due = []
    for seconds in (0.99 * every, every):
        monkeypatch.setattr(execution.time, "monotonic", lambda at=seconds: at)
        due.append(session._is_due(step=3))
    assert due == [False, True]


def test_a_resumed_run_says_what_was_lost_and_where_it_will_end(tiny, tmp_path):
    config = tiny.replace(seed=None, noise_multiplier=None, epsilon=3.0)
    (message,), result = resumed_after_a_crash(config, tmp_path / "run")
    plan = result.plan
    assert message.startswith("4 steps on the ledger are not in the model, whose last checkpoint ")
    assert f"epsilon {up(plan.epsilon(5))} of 3 is spent" in message
    assert f"and {up(plan.epsilon(1))} would be without" in message
    assert f"training will end at step {result.steps} of 8" in message
    assert result.status == "budget ended"
    assert 1 < result.steps < 8
    assert result.ending.startswith(
        f"the privacy budget ended at step {result.steps} of 8: 4 steps"
    )


def test_a_seeded_run_repeats_what_was_lost_and_says_so(tiny, tmp_path):
    (message,), result = resumed_after_a_crash(tiny, tmp_path / "run")
    assert "They are repeated with the same noise, at no further cost" in message
    assert (result.status, result.charged) == ("complete", 8)


def test_a_run_that_lost_nothing_says_nothing(tiny, tmp_path):
    execute(tiny, tmp_path / "run")
    heard = Messages()
    execute(stored_config(tmp_path / "run"), tmp_path / "run", resume=True, reporter=heard)
    assert heard.messages == []


def reserved_and_spent(tiny, folder):
    """What the budget held when a run that lost steps was resumed, and what it took."""
    budget = Budget.create(folder / "budget.json", epsilon=3.5, delta=1e-4, accountant="rdp")
    config = tiny.replace(seed=None, noise_multiplier=None, epsilon=3.0, budget=budget.path)
    out, reserved = folder / "run", []
    die_after_charging(config, out, 2)
    real = Trainer.run

    def run(self, **more):
        reserved.extend(budget.entries()[0].charges)
        return real(self, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", run)
        result = resume(out)
    assert result.status == "budget ended"
    spent = Ledger(1e-4, "rdp", out / "ledger.jsonl").charges()
    return by_kind(reserved), by_kind(spent), result


def test_the_budget_holds_every_step_that_a_resumed_run_may_take(tiny, tmp_path):
    reserved, spent, result = reserved_and_spent(tiny, tmp_path)
    assert spent <= reserved
    # negative control: without the lost steps less would be reserved than was spent
    assert not spent <= by_kind(result.plan.charges(result.steps))


def test_a_resumed_run_that_the_budget_does_not_hold_is_refused(tiny, tmp_path):
    config = tiny.replace(seed=None)  # without an epsilon of its own it repeats what a crash lost
    planned = 1.0001 * prepare(config).plan.epsilon()
    budget = Budget.create(tmp_path / "b.json", epsilon=planned, delta=1e-4, accountant="rdp")
    die_after_charging(config.replace(budget=budget.path), tmp_path / "run", 2)
    with pytest.raises(RunError, match="this run would exceed epsilon"):
        resume(tmp_path / "run")


PARTS = [
    {"filter": "doppler", "clipping": "slaclip"},
    {"method": "disk", "clipping": "quantile"},
    {"method": "disk", "method_options": {"kappa": 0.5, "gamma": 0.5}, "engine": "functional"},
    {"filter": "exponential", "filter_options": {"beta": 0.5}},
    {"optimizer": "adam", "correct_noise": True},
]


@pytest.mark.parametrize(
    "changes", [PARTS[0], *(pytest.param(c, marks=pytest.mark.slow) for c in PARTS[1:])], ids=str
)
def test_a_run_that_died_ends_as_if_it_had_not_whatever_its_parts(tiny, begun, tmp_path, changes):
    execute(tiny.replace(**changes), tmp_path / "whole")
    out = begun(**changes)
    resume(out)
    assert model_of(out) == model_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("owner", "changes"),
    [
        (LowPass, PARTS[0]),
        pytest.param(AdaptiveClipping, PARTS[0], marks=pytest.mark.slow),
        pytest.param(KalmanStep, PARTS[1], marks=pytest.mark.slow),
    ],
)
def test_a_part_that_forgets_its_state_is_found_out(tiny, begun, tmp_path, owner, changes):
    """Negative control: what a checkpoint has of the part is not read."""
    execute(tiny.replace(**changes), tmp_path / "whole")
    out = begun(**changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "load_state_dict", lambda self, state: None)
        resume(out)
    assert model_of(out) != model_of(tmp_path / "whole")


def model_of(out):
    return (out / "model.safetensors").read_bytes()


def test_speed_may_change_in_an_unseeded_run(begun):
    out = begun(seed=None, lr=0.03)
    result = resume(out, physical_batch_size=50, engine="functional", num_workers=1, eval_every=1)
    assert (result.steps, result.charged, result.status) == (8, 8, "complete")
    assert stored_config(out).physical_batch_size == 50


def test_more_epochs_are_charged(begun):
    out = begun()
    result = resume(out, epochs=2)
    assert (result.steps, result.charged) == (16, 16)
    assert result.epsilon == result.plan.epsilon(16)


def test_more_epochs_than_the_budget_holds_are_refused(begun):
    out = begun(noise_multiplier=None, epsilon=1.0)
    with pytest.raises(RunError, match=r"2 epochs would spend epsilon .* of the run's 1"):
        resume(out, epochs=2)
    assert resume(out).epsilon <= 1.0


@pytest.mark.parametrize("shape", [{"schedule": "cosine"}, {"swa": 0.5}])
def test_epochs_stay_where_the_shape_of_training_depends_on_them(begun, shape):
    out = begun(**shape)
    with pytest.raises(RunError, match="epochs was 1"):
        resume(out, epochs=2)


@pytest.mark.parametrize(
    ("step", "most", "says"),
    [
        (6, 8, "Nothing is left for the other 2 of 8 steps: the training has ended, and the model"),
        (6, 9, "pays for 1 of the 2 steps to go, so training will end at step 7 of 8"),
        (6, 12, "What is left pays for all steps to go, 2"),
        (8, 10, "The model has all 8 steps"),
    ],
)
def test_what_the_budget_pays_for_after_a_crash_is_said(tiny, step, most, says):
    config = tiny.replace(seed=None)
    plan = prepare(config).plan
    ledger = plan.ledger()
    for k in range(step + 2):
        ledger.charge("s", k, noise_multiplier=plan.noise_multiplier,
                      sampling_rate=plan.sampling_rate)  # fmt: skip
    message = execution._lost_steps(config, plan, ledger, step, max(most, len(ledger)))
    assert says in message


def test_moved_data_is_known_by_its_content(begun, tmp_path):
    """Folders and .npz files may move; the statement then names the test records as they are."""
    rng = np.random.default_rng(0)
    for split, records in (("train", 500), ("test", 50)):
        for k, image in enumerate(rng.integers(0, 256, (records, 8, 8), np.uint8)):
            place = tmp_path / "old" / split / "ab"[k % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{k:03}.png")
    old, moved = tmp_path / "old", tmp_path / "moved"
    out = begun(data=str(old), batch_size=100)
    old.rename(moved)
    with pytest.raises(RunError, match=r"data is not at .*old: if it was moved, name where"):
        resume(out)
    with pytest.raises(RunError, match=r"data was .*old when the run began and cannot become dig"):
        resume(out, data="digits")
    for split, name in (("train", "data"), ("test", "test data")):
        shutil.copytree(moved, tmp_path / f"other-{split}")
        first = tmp_path / f"other-{split}" / split / "a" / "000.png"
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(first)
        with pytest.raises(RunError, match=rf"/{split} is not the {name} that the run began with"):
            resume(out, data=str(tmp_path / f"other-{split}"))
    resume(out, data=str(moved))
    assert stored_config(out).data == str(moved)
    statement = Statement.read(out / "privacy-statement.json")
    assert statement.evaluated_on.set == "moved/test"
    check_statement(RunFolder(out), statement)


def test_other_data_is_refused(begun, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (1500, 8, 8), np.uint8)
    labels = np.arange(1500) % 10
    path = tmp_path / "set.npz"
    np.savez(path, images=images, labels=labels)
    out = begun(data=str(path))
    images[0] ^= 255
    np.savez(path, images=images, labels=labels)
    with pytest.raises(RunError, match="is not the data that the run began with"):
        resume(out)


def test_another_number_of_threads_is_refused_in_a_seeded_run(begun):
    out = begun()
    facts = json.loads((out / "non-private" / "run.json").read_text())
    facts["threads"] += 1
    (out / "non-private" / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match=f"set OMP_NUM_THREADS={facts['threads']}"):
        resume(out)


def test_a_ledger_that_lost_steps_is_refused(begun):
    out = begun()
    lines = (out / "ledger.jsonl").read_text().splitlines(keepends=True)
    (out / "ledger.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(RunError, match="holds 2 steps, but the checkpoint has seen 4"):
        resume(out)


def test_a_ledger_of_another_mechanism_is_refused(begun):
    out = begun()
    ledger = (out / "ledger.jsonl").read_text()
    (out / "ledger.jsonl").write_text(ledger.replace("4.0", "5.0"))
    with pytest.raises(RunError, match="not this run's ledger"):
        resume(out)


def test_without_checkpoints_the_run_starts_over_and_pays_for_what_was_lost(begun):
    out = begun(seed=None, checkpoint_every=1000)
    shutil.rmtree(out / "checkpoints")
    result = resume(out)
    assert (result.steps, result.charged) == (8, 12)
    assert result.epsilon == result.plan.epsilon(12)


def test_a_longer_run_withdraws_its_statement_before_the_first_new_step(tiny, tmp_path):
    """Else a crash would leave an epsilon next to releases that it does not cover."""
    out = tmp_path / "run"
    execute(tiny, out)
    folder, seen = RunFolder(out), []
    assert folder.statement_json.exists()

    class Watch(Reporter):
        def on_step(self, *args, **more):
            seen.append(folder.statement_json.exists())

    execute(tiny.replace(epochs=2 * tiny.epochs), out, resume=True, reporter=Watch())
    assert seen
    assert not any(seen)
    assert folder.statement_json.exists()


def test_a_run_without_a_step_left_keeps_its_statement(tiny, tmp_path):
    """The control of the test above."""
    execute(tiny, tmp_path)
    before = RunFolder(tmp_path).statement_json.read_bytes()
    execute(tiny, tmp_path, resume=True)
    assert RunFolder(tmp_path).statement_json.read_bytes() == before
