"""From a configuration to a finished run folder.

The order keeps the count true: the run's facts are on disk before its budget is reserved, the
reservation before the first step, every step on the ledger before it reaches the parameters, and
the checkpoint after both. After a crash at any moment, what is on disk counts at least what was
released.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpbam._jsonl import sync_folder
from dpbam.app.runs import spending
from dpbam.app.runs.automatic import as_chosen
from dpbam.app.runs.budget import Budget
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.documents import RunFacts
from dpbam.app.runs.facts import (
    check_config,
    check_prepared,
    check_unchanged,
    initial_tensors,
    new_facts,
    test_facts,
)
from dpbam.app.runs.files import DiskError, disk_error, write_atomic
from dpbam.app.runs.first_release import apply_first_release
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.identity import identity
from dpbam.app.runs.model_file import save_run_model
from dpbam.app.runs.preparation import Prepared, prepare
from dpbam.app.runs.rows import Recorder, TensorBoard
from dpbam.app.runs.run import RunError, RunInterruptedError, RunResult, RunSpec, graceful
from dpbam.app.runs.statement import statement, write_statement
from dpbam.distributed import EndedElsewhereError, RankLostError, Ranks
from dpbam.privacy.plan import replace_quietly
from dpbam.privacy.rounding import up
from dpbam.training.events import Reporter, Several, StartReport

if TYPE_CHECKING:
    from dpbam.bias import BiasLens, BiasRecord
    from dpbam.engines.memory import Fit
    from dpbam.privacy.ledger import Ledger
    from dpbam.privacy.plan import PrivacyPlan
    from dpbam.training.trainer import Ending, Trainer, TrainerState

_PATIENCE = 10.0  # seconds without a sign of progress
_MOST, _LEAST = 60.0, 1.0  # seconds between checkpoints, where they are not configured
_SHARE = 0.01  # of the time that checkpoints then take


def execute(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    reporter: Reporter | None = None,
    ranks: Ranks | None = None,
) -> RunResult:
    """Train as ``config`` says into the run folder ``out``.

    Args:
        config: what to do. To resume, start from :func:`dpbam.app.runs.stored_config`; what may be
            changed then is in :mod:`dpbam.app.runs.facts`.
        out: must not exist or be empty, unless ``resume``.
        resume: continue the run in ``out``; a finished one is finished again, at no cost.
        reporter: is called with the progress.
        ranks: the processes that train together, each of which calls this. The leader alone
            touches the run folder and reports progress; all get the same result.

    Raises:
        RunError: if the folder, its lock, a checkpoint or the budget stands in the way.
        ConfigError: if the configuration cannot be used.
        dpbam.data.DataError: if the data cannot.
        RunInterruptedError: after Ctrl-C or SIGTERM, when a checkpoint is saved.
        dpbam.distributed.RankLostError: if another process is gone; a checkpoint is saved.
    """
    folder, listener, ranks = RunFolder(out), reporter or Reporter(), ranks or Ranks()
    with folder.opened(resume=resume) if ranks.leads else nullcontext():
        begin = _resumed if resume else _begun
        facts, prepared = begin(folder, config, ranks)
        if ranks.leads:
            return _Session(folder, facts, prepared, listener, ranks).run()
        return _follow(prepared, folder.path, ranks)


def _begun(folder: RunFolder, config: RunConfig, ranks: Ranks) -> tuple[RunFacts, Prepared]:
    """Prepare a new run, which is refused before anything is written."""
    prepared = prepare(config, cache=folder.non_private if ranks.leads else None)
    # every image is read, so that a broken one is refused before anything is written or charged
    prepared = replace(prepared, warnings=tuple(ranks.from_leader(prepared.defects)))
    facts = ranks.from_leader(lambda: new_facts(prepared, ranks.world))
    if ranks.world > 1:
        check_prepared(facts, prepared, ranks.world)
        # each host calibrates by itself, perhaps with other last bits: all take the leader's sigma
        plan = replace_quietly(prepared.plan, noise_multiplier=facts.noise_multiplier)
        prepared = replace(prepared, plan=plan)
    if config.budget is not None and ranks.leads:
        Budget(config.budget)  # refuse a missing one before the folder holds a run
    return facts, prepared


def _resumed(folder: RunFolder, config: RunConfig, ranks: Ranks) -> tuple[RunFacts, Prepared]:
    """Prepare a run again, with its sigma and, on the same device, its physical batch size."""
    facts = ranks.from_leader(folder.read_facts)
    config = as_chosen(config, facts.config)
    check_config(facts, config)
    stored, fitted = facts.config, config
    if (config.device, config.engine) == (stored.device, stored.engine):
        rows = config.physical_batch_size or facts.physical_batch_size
        fitted = config.replace(physical_batch_size=rows)
    cache = folder.non_private if ranks.leads else None
    prepared = prepare(fitted, noise_multiplier=facts.noise_multiplier or None, cache=cache)
    check_prepared(facts, prepared, ranks.world)
    # the same records may have another name, where the data was moved
    update = {"config": config, "test": test_facts(prepared)}
    return facts.model_copy(update=update), prepared


def _follow(prepared: Prepared, out: Path, ranks: Ranks) -> RunResult:
    """Train on a rank that does not lead, from the leader's weights and step; write nothing.

    The ledger here stays empty: what is released is charged where it is released.
    """
    # the leader keeps the records of bias and statistics, which are the same on all ranks
    lens = _lens(prepared, lambda record: None)
    oracle = prepared.oracle(None, lens, lambda released: None, ranks)
    trainer = prepared.trainer(oracle, Reporter())
    trainer.load_state_dict(ranks.from_leader(trainer.state_dict))
    prepared.task.load_state_dict(ranks.from_leader(prepared.task.state_dict))
    with graceful(_silent) as stop:
        trainer.run(stop=stop)
        result = ranks.from_leader(_leaders_result)
    if result is None:
        raise RunInterruptedError(out, trainer.oracle.step, prepared.plan.steps)
    return result


def _lens(prepared: Prepared, sink: Callable[[BiasRecord], None]) -> BiasLens | None:
    """Return what measures the bias along the way, by both readings, if that was asked for."""
    from dpbam.bias import BiasLens

    every = prepared.config.measure_bias
    return BiasLens(sink, every=every, plain=True) if every else None


def _leaders_result() -> RunResult | None:
    raise AssertionError("the leader has a result of its own")


class _Session:
    """One process's work on a run: the leader's, of several."""

    def __init__(
        self,
        folder: RunFolder,
        facts: RunFacts,
        prepared: Prepared,
        reporter: Reporter,
        ranks: Ranks,
    ) -> None:
        self.folder, self.facts, self.prepared, self.ranks = folder, facts, prepared, ranks
        self.recorder = Recorder(folder)
        board = [TensorBoard(folder)] if prepared.config.tensorboard else []
        self.reporter = Several(self.recorder, *board, reporter)
        self._saved = (time.monotonic(), -1)  # when, and at which step
        self._saving_seconds = 0.0  # of the latest checkpoint
        self._has_checkpoint = False

    def run(self) -> RunResult:
        with closing(self._ledger()) as ledger:  # another process may then resume the run
            return self._run(ledger)

    def _run(self, ledger: Ledger) -> RunResult:
        from dpbam.app.runs import checkpoint

        config, plan = self.prepared.config, self.prepared.plan
        latest = checkpoint.load_latest(self.folder.checkpoints, self.facts.run)
        lens = _lens(self.prepared, self.recorder.on_bias)
        oracle = self.prepared.oracle(ledger, lens, self.recorder.on_release, self.ranks)
        fit = self.prepared.fit(oracle)
        self.facts = self.facts.model_copy(update={"physical_batch_size": fit.rows})
        trainer = self.prepared.trainer(oracle, self.reporter)
        self._has_checkpoint = latest is not None
        if latest:
            self._load(trainer, ledger, latest)
            check_unchanged(trainer.model, self.facts)
        else:  # new weights, which have seen no data
            oracle.expect_earlier_steps()  # of this run: it says what they cost
            tensors = initial_tensors(trainer.model)
            self.facts = self.facts.model_copy(update={"initial_tensors": tensors})
        spending.check_ledger(plan, ledger, oracle.step)
        if spending.is_lost(config, plan, ledger, oracle.step):  # the model would be untrained
            problem = f"the run in {self.folder.path} was ended before its first checkpoint"
            raise spending.explain_loss(problem, ledger)
        trainer.max_charges = spending.most_charges(config, plan, ledger, oracle.step)
        self._write_down(trainer.max_charges, ledger, oracle.step)
        if config.released_before is not None:
            apply_first_release(self.folder, self.prepared, oracle)
        if config.release_centre is not None:
            # the centre is released, and fixed from here on
            tensors = initial_tensors(trainer.model)
            self.facts = self.facts.model_copy(update={"initial_tensors": tensors})
            self.facts.write(self.folder.facts)
        trainer.evaluations = self.recorder.rewind(oracle.step)
        self.ranks.from_leader(trainer.state_dict)  # all ranks begin with the same weights
        self.ranks.from_leader(self.prepared.task.state_dict)

        began = time.monotonic()
        self._announce(oracle.step, fit)
        if lost := _lost_steps(config, plan, ledger, oracle.step, trainer.max_charges):
            self.reporter.on_message(lost)
        with graceful(self.reporter.on_message if self.ranks.world == 1 else _silent) as stop:
            try:
                ending = self._train(trainer, stop)
            except BaseException:
                with suppress(RunError):  # what ended the training is what counts
                    spending.note(config.budget, self.facts.run, ledger)
                raise
        result = self.ranks.from_leader(
            lambda: self._finish(trainer, ending, time.monotonic() - began)
        )
        if result is None:
            raise RunInterruptedError(self.folder.path, oracle.step, plan.steps)
        return result

    def _ledger(self) -> Ledger:
        """Return the run's ledger: empty for a new run; one that has begun must have its file."""
        plan = self.prepared.plan
        if self.folder.started:
            return spending.stored_ledger(self.folder, plan.delta, plan.accountant)
        return plan.ledger(self.folder.ledger)

    def _load(self, trainer: Trainer, ledger: Ledger, state: TrainerState) -> None:
        """Load a checkpoint, which may be whole and yet of another model."""
        try:
            spending.check_steps(ledger, state["oracle"]["step"])
            trainer.load_state_dict(state)
        except RunError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            said = str(error).strip().splitlines()[0]
            raise RunError(
                f"the latest checkpoint in {self.folder.checkpoints} does not fit the run "
                f"({said}): delete it, and resume"
            ) from None

    def _write_down(self, charges: int, ledger: Ledger, step: int) -> None:
        """Write the run's facts and its ledger, then its reservation: now it can be resumed."""
        self.folder.non_private.mkdir(mode=0o700, exist_ok=True)
        new = not self.folder.started
        if new:
            write_atomic(self.folder.ledger, "")
        self.facts.write(self.folder.facts)
        try:
            self._reserve(charges, ledger, step)
        except ValueError:
            if new:  # refused: as if it had never begun
                self.folder.facts.unlink()
                self.folder.ledger.unlink()
            raise
        sync_folder(self.folder.path)
        write_atomic(self.folder.config, self._resolved().to_toml())

    def _resolved(self) -> RunConfig:
        """Return the configuration as asked for, with what was chosen in place of defaults."""
        asked, plan = self.facts.config, self.prepared.plan
        return asked.replace(delta=plan.delta, unit=plan.unit, batch_size=plan.batch_size)

    def _reserve(self, charges: int, ledger: Ledger, step: int) -> None:
        """Reserve what the run may take; which kind of step a lost one was is not known here."""
        config, plan = self.prepared.config, self.prepared.plan
        if config.budget is not None:
            lost = spending.replays(config, ledger, step)
            most = plan.charges(max(0, charges - lost), lost)
            spending.reserve(config.budget, self.folder, self.facts.run, most, plan.unit, ledger)

    def _announce(self, step: int, fit: Fit) -> None:
        from dpbam.params import count_trainable

        prepared, config = self.prepared, self.prepared.config
        for note in prepared.train.notes:
            self.reporter.on_non_private_note(note)
        for warning in prepared.warnings:
            self.reporter.on_non_private_warning(warning)
        if step == 0:
            self.reporter.on_message(prepared.evaluated_on)
        for line in prepared.chosen:
            self.reporter.on_message(line)
        self._watch_features()
        self.reporter.on_start(
            StartReport(
                plan=prepared.plan,
                step=step,
                epsilon=config.epsilon or prepared.plan.epsilon(),
                method="closed form" if config.in_closed_form else config.method,
                model=config.model,
                parameters=count_trainable(prepared.model),
                physical_batch_size=fit.rows,
                engine=fit.engine,
                device=prepared.device,
                seeded=config.seed is not None,
                out=self.folder.path,
            )
        )

    def _watch_features(self) -> None:
        """Report every ten seconds how far the features are, which are computed when first read."""
        from dpbam.app.runs.feature_model import FixedFeatureImages

        reported = time.monotonic()

        def report(records: int, of: int) -> None:
            nonlocal reported
            if time.monotonic() - reported >= _PATIENCE:
                reported = time.monotonic()
                self.reporter.on_message(f"features of {records} of {of} records")

        for data in self.prepared.seen:
            if isinstance(data.images, FixedFeatureImages):
                data.images.progress = report

    def _train(self, trainer: Trainer, stop: Callable[[], bool]) -> Ending:
        def after_step() -> None:
            if stop() or self._is_due(trainer.oracle.step):
                self._save(trainer)

        if trainer.oracle.step < self.prepared.plan.steps:
            self.folder.withdraw_statement()  # no new releases next to an old one
        try:
            ending = trainer.run(after_step=after_step, stop=stop)
        except (RankLostError, EndedElsewhereError):
            self._save_once(trainer)  # the step that failed has not reached the parameters
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise disk_error(self.folder.ledger, error) from error  # the step was not released
        self._save_once(trainer)
        return ending

    def _is_due(self, step: int) -> bool:
        """Whether it is time for a checkpoint.

        A crash loses the steps since the latest one, which are paid for: so they come as often as
        costs little. The first comes after a minute or a tenth of the steps, whichever is earlier.
        """
        every, elapsed = self.prepared.config.checkpoint_every, time.monotonic() - self._saved[0]
        if every is None:
            every = min(_MOST, max(_LEAST, self._saving_seconds / _SHARE))
        if self._has_checkpoint:
            return elapsed >= every
        return elapsed >= min(every, _MOST) or step >= math.ceil(self.prepared.plan.steps / 10)

    def _save_once(self, trainer: Trainer) -> None:
        if self._saved[1] != trainer.oracle.step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        from dpbam.app.runs import checkpoint

        began = time.monotonic()
        check_unchanged(trainer.model, self.facts)
        spending.note(self.prepared.config.budget, self.facts.run, trainer.oracle.ledger)
        state, config, plan = trainer.state_dict(), self.prepared.config, self.prepared.plan
        try:
            path = checkpoint.save(self.folder.checkpoints, state, self.facts.run)
        except DiskError as error:
            ledger = trainer.oracle.ledger
            if self._has_checkpoint or not spending.is_lost(config, plan, ledger, 0):
                raise
            raise spending.explain_loss(error.problem, ledger) from error
        self._saved, self._has_checkpoint = (time.monotonic(), trainer.oracle.step), True
        self._saving_seconds = self._saved[0] - began
        self.reporter.on_checkpoint(path, trainer.oracle.step)

    def _finish(self, trainer: Trainer, ending: Ending, seconds: float) -> RunResult | None:
        """Settle the budget, hand out the model, make the statement. Doing it twice is harmless."""
        if ending == "stopped":
            return None
        prepared, config, ledger = self.prepared, self.prepared.config, trainer.oracle.ledger
        step = trainer.oracle.step
        signed = self.folder.withdraw_statement()  # no new weights next to an old one
        with trainer.averaged():
            check_unchanged(prepared.model, self.facts)
            save_run_model(self.folder, prepared.model, config, prepared.train)
        values = statement(
            prepared, ledger, run=self.facts.run, steps=step,
            evaluations=self.folder.count_evaluations(seeded=config.seed is not None),
            identity=identity(self.folder, self._resolved()),
            budget=spending.settle(config.budget, self.folder, self.facts.run, ledger),
        )  # fmt: skip
        write_statement(self.folder, values)
        if signed and signed[0] == self.folder.statement_json.read_bytes():
            write_atomic(self.folder.signature, signed[1])
        result = RunResult(
            spec=RunSpec(config.method, config, self.folder.path),
            status=ending,
            plan=prepared.plan,
            steps=step,
            charged=len(ledger),
            epsilon=values.epsilon,
            delta=prepared.plan.delta,
            evaluations=tuple(trainer.evaluations),
            seconds=seconds,
            pairing=self.folder.pairing(),
        )
        self.reporter.on_end(result.ending)
        return result


def _lost_steps(config: RunConfig, plan: PrivacyPlan, ledger: Ledger, step: int, most: int) -> str:
    """Describe the steps on the ledger that the model does not contain; empty if there are none.

    Args:
        config: the run's.
        plan: the run's.
        ledger: what was charged.
        step: that of the checkpoint.
        most: the most steps that the ledger may hold.
    """
    lost = len(ledger) - step
    if lost <= 0:
        return ""
    where = f"whose last checkpoint is of step {step}" if step else "which has no checkpoint yet"
    began = f"{lost} steps on the ledger are not in the model, {where}: a crash lost them. "
    if config.seed is not None or not plan.private:
        same = "They are repeated with the same noise, at no further cost"
        return began + (same if plan.private else "They are taken again")
    left = max(0, min(plan.steps - step, most - len(ledger)))
    budget = "" if config.epsilon is None else f" of {up(config.epsilon)}"
    return (
        f"{began}They are paid for, since new noise cannot repeat them: epsilon "
        f"{up(ledger.epsilon())}{budget} is spent, and {up(plan.epsilon(step))} would be without "
        f"them. {_steps_ahead(step, left, plan.steps)}"
    )


def _steps_ahead(step: int, left: int, steps: int) -> str:
    """Say how many of the steps after ``step`` the run's epsilon pays for: ``left`` of them."""
    planned = steps - step
    if not planned:
        return f"The model has all {steps} steps"
    if not left:
        return (
            f"Nothing is left for the other {planned} of {steps} steps: the training has ended, "
            f"and the model is that of step {step}"
        )
    if left == planned:
        return f"What is left pays for all steps to go, {planned}"
    return (
        f"What is left pays for {left} of the {planned} steps to go, so training will end at step "
        f"{step + left} of {steps}"
    )


def _silent(message: str) -> None:
    """Print nothing: all processes get the signal, and the leader reports the end."""
