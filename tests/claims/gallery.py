"""The gallery: every mistake that is planted anywhere, with what catches it.

Most are planted next to the claims that they break; the ones here are caught by the audits, which
know nothing of how a step is computed, and by the checks of secure noise and of hostile files.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import test_accounting_claims as accounting_claims
import test_bits_claims as bits_claims
import test_first_release_claims as first_release_claims
import test_first_use_claims as first_use_claims
import test_generator_claims as generator_claims
import test_gradient_claims as gradient_claims
import test_handover_claims as handover_claims
import test_head_claims as head_claims
import test_interruption_claims as interruption_claims
import test_ledger_claims as ledger_claims
import test_noise_claims as noise_claims
import test_own_code_claims as own_code_claims
import test_owner_claims as owner_claims
import test_post_processing as post_processing
import test_publishing_claims as publishing_claims
import test_rank_claims as rank_claims
import test_reading_claims as reading_claims
import test_rounding_claims as rounding_claims
import test_scale_claims as scale_claims
import test_schedule_claims as schedule_claims
import test_sensitivity as sensitivity_claims
import torch
from attacks import AuditResult, Target, audit
from safetensors.torch import save
from scipy.special import ndtri

from app.cli.test_progress_private import (
    check_a_jobs_output,
    check_a_jobs_output_has_no_notes_of_the_data,
)
from checks import RARE, check_poisson, check_uncorrelated
from dpbam import FlatClipping, __version__, _validate, mechanism
from dpbam.app.audit.accountant import bracket
from dpbam.app.cli import progress
from dpbam.app.runs import ConfigError, RunError, load_run_model, meaning
from dpbam.app.runs.documents import ModelFacts
from dpbam.app.runs.files import FORMAT
from dpbam.data import DataError, npz
from dpbam.privacy import accounting, ledger, secure_noise
from dpbam.privacy.accounting import Charge
from dpbam.privacy.clipping import StepClipping
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness, SecureRandomness
from dpbam.privacy.sampling import UnitIndex
from dpbam.privacy.secure_noise import SecureGaussianNoise, grid
from planting import Mistake
from support import private_plan

ONE_STEP = Target(epsilon=4.0, delta=1e-5, engine="functional")  # one canary, many runs
MANY = Target(epsilon=4.0, delta=1e-5, canaries=2000, n=2001, batch_size=2001)  # one run
CONFIDENCE = 1 - 1e-7  # of an audit here: it refutes a right implementation once in 10^7 runs
AUDITS: list[AuditResult] = []  # all that the checks here made, in order


def attack(target: Target, trials: int = 100) -> Callable[[], None]:
    """An audit as a check: the claim stands.

    Of 2000 scores at mu = 1.85, twice the claim's, the mean-difference bound shows 1.4 at this
    confidence, with a standard error of 0.05: below the claim's 0.93 once in 10^19 times.
    """

    def gradient_canary_audit() -> None:
        """Gradient canaries refute no claim."""
        AUDITS.append(audit(target, trials=trials, confidence=CONFIDENCE))
        assert not AUDITS[-1].violated, AUDITS[-1].verdict

    return gradient_canary_audit


# --- mistakes that an audit catches


def no_clipping(real: Any) -> Any:
    """Where the clipping's check of the factors does not see it."""

    def clipped_sums(step: Any) -> Any:
        queries = real(replace(step, clipping=FlatClipping(math.inf).at(step.attempt.number)))
        sigma = step.plan.noise_multiplier_at(step.attempt.number)
        std = sigma * step.clipping.sensitivity
        return {name: replace(query, std=std) for name, query in queries.items()}

    return clipped_sums


def half_the_sensitivity(real: Any) -> Any:
    return property(lambda step: real.fget(step) / 2)


def missing_on_the_first(real: Any) -> Any:
    def add(self: Any, sums: Mapping[str, Any], std: float, step: int, **more: Any) -> Any:
        first = next(iter(sums))
        raw = sums[first].clone()  # noise may be written over it
        return {**real(self, sums, std, step, **more), first: raw}

    return add


def clips_to_twice(real: Any) -> Any:
    """Likewise."""

    def clipped_sums(step: Any) -> Any:
        return {
            name: replace(query, sums={n: 2 * s for n, s in query.sums.items()})
            for name, query in real(step).items()
        }

    return clipped_sums


def a_constant_noise(real: Any) -> Any:
    """The seed of a research run left in: an attacker subtracts the noise."""
    return lambda self, *stream: np.random.SFC64(0)


AUDITED = {
    "no clipping": Mistake(attack(MANY), mechanism, "clipped_sums", no_clipping),
    "sensitivity off by two": Mistake(
        attack(MANY), StepClipping, "sensitivity", half_the_sensitivity
    ),
    "clipped to 2 C": Mistake(attack(MANY), mechanism, "clipped_sums", clips_to_twice),
    "no noise on one parameter": Mistake(
        attack(ONE_STEP), GaussianNoise, "add", missing_on_the_first
    ),
    "noise that is known": Mistake(
        attack(ONE_STEP), Randomness, "noise_generator", a_constant_noise
    ),
}


# --- mistakes of secure noise


def check_exact_rounding() -> None:
    """Words near an edge go to the integer that 60 digits say."""
    deviation = 2.0**45
    k = np.random.default_rng(0).integers(0, 2**63, 4000, dtype=np.uint64)
    x = -ndtri((k.astype(np.float64) + 0.5) * 2.0**-64)
    k = k[np.abs(deviation * x % 1 - 0.5) < 0.02]
    drawn = secure_noise.rounded_gaussian(deviation, k << np.uint64(1), SecureRandomness())
    for word, z in zip(k, drawn, strict=True):
        least, most = (
            secure_noise.exactly_rounded((int(word) << 128) | extra, 192, z / deviation, deviation)
            for extra in (2**128 - 1, 0)
        )
        assert least <= z <= most


def check_on_the_grid() -> None:
    """Nothing of the sum's last bits is released."""
    third = {"w": torch.full((100,), 1 / 3, dtype=torch.float64)}
    out = SecureGaussianNoise(SecureRandomness()).add(third, 1.0, 0)["w"]
    assert bool((out / grid(1.0) % 1 == 0).all())


def check_secure_noise_is_new() -> None:
    """Two steps are independent."""
    noise, zero = SecureGaussianNoise(SecureRandomness()), {"w": torch.zeros(500)}
    check_uncorrelated(noise.add(zero, 1.0, 0)["w"], noise.add(zero, 1.0, 0)["w"], RARE)


def check_secure_sampling() -> None:
    """Poisson, with the stated rate."""
    sampler = private_plan(n=100, batch_size=20, steps=200).sampler(secure=True)
    check_poisson([sampler.indices(t) for t in range(200)], 100, 0.2, RARE)


def never_unsure(real: Any) -> Any:
    """Doubles alone."""

    def rounded(*given: Any) -> Any:
        kept = secure_noise._ERROR, secure_noise._TAIL
        secure_noise._ERROR, secure_noise._TAIL = 0.0, np.inf
        try:
            return real(*given)
        finally:
            secure_noise._ERROR, secure_noise._TAIL = kept

    return rounded


def not_rounded(real: Any) -> Any:
    return lambda self, s, spacing, deviation: s + (real(self, 0 * s, spacing, deviation))


def one_key(real: Any) -> Any:
    return lambda count: bytes(count)


def biased_words(real: Any) -> Any:
    """A slip of one bit."""
    return lambda self, name, step, count: real(self, name, step, count) / 2


SECURE = {
    "rounding left to doubles": Mistake(
        check_exact_rounding, secure_noise, "rounded_gaussian", never_unsure
    ),
    "the sum not on the grid": Mistake(check_on_the_grid, SecureGaussianNoise, "_one", not_rounded),
    "a key used twice": Mistake(check_secure_noise_is_new, secrets, "token_bytes", one_key),
    "uniform numbers below 1/2 only": Mistake(
        check_secure_sampling, SecureRandomness, "uniform", biased_words
    ),
}


# --- mistakes of the accountant, and of readers


def check_second_accountant() -> None:
    """Both accountants agree."""
    charges = [Charge(1.1, 0.05, 20)]
    low, high = bracket(charges, 1e-5)
    found = accounting.total_epsilon(charges, 1e-5)
    assert low * (1 - 1e-6) <= found <= high * 1.01


def half_the_rate(real: Any) -> Any:
    return lambda charges, *rest: real(
        tuple(Charge(c.noise_multiplier, c.sampling_rate / 2, c.steps) for c in charges), *rest
    )


def check_arrays_run_nothing() -> None:
    """An .npz file whose array asks for a call is refused, and the call is not made."""
    with tempfile.TemporaryDirectory() as folder:
        path, mark = Path(folder) / "set.npz", Path(folder) / "mark"
        np.savez(path, images=np.array([_Hostile(str(mark))], dtype=object), labels=[0])
        with contextlib.suppress(DataError):
            npz.NpzFile(path, Path(folder)).images("images")
        assert not mark.exists(), "the file's own code was run"


class _Hostile:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def trusting(real: Any) -> Any:
    return lambda file, name: np.load(file.path, allow_pickle=True)[name]


def check_files_run_no_code() -> None:
    """A model.json that names a function is refused, and the function is not called."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        facts = ModelFacts(
            format=FORMAT,
            dpbam=__version__,
            model="os:mkdir",
            model_options={"path": str(mark)},
            image_shape=[1, 8, 8],
            task="single-label",
            class_names=["a", "b"],
            input="pixels",
            method="dp-sgd",
        )
        facts.write(Path(folder) / "model.json")
        (Path(folder) / "model.safetensors").write_bytes(save({"w": torch.ones(1)}))
        refusal = ""
        try:
            load_run_model(folder)
        except (ConfigError, RunError) as error:
            refusal = str(error)
        assert not mark.exists(), "a file's own code was run"
        # a file that is refused for another reason would not show that its code is
        assert "names code to run" in refusal, refusal


def no_code_at_all(real: Any) -> Any:
    return lambda name, spec: False


def check_a_lost_line_end() -> None:
    """A step that may have been released counts, though an editor took its line end off."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        for step in range(2):
            Ledger(1e-5, path=path).charge("a", step, noise_multiplier=1.0, sampling_rate=0.1)
        edited = path.with_name("edited.jsonl")  # the process knows what the first file holds
        edited.write_bytes(path.read_bytes().rstrip())
        assert len(Ledger(1e-5, path=edited)) == len(Ledger(1e-5, path=edited)) == 2


def only_whole_lines(real: Any) -> Any:
    return lambda line: False


def check_everyone_has_a_name() -> None:
    """Records without an owner are refused: they would share one promise."""
    for labels in (["ann", "", "bob"], np.array([1.0, np.nan]), np.array(["ann", None])):
        try:
            UnitIndex(labels, max_records=2)
        except ValueError:
            continue
        raise AssertionError("strangers without a name are one unit of privacy")


def nobody_is_missing(real: Any) -> Any:
    return lambda name, labels: None


def says_everything(real: Any) -> Any:
    return lambda name, report: print(name, report)


def printed_as_messages(real: Any) -> Any:
    return lambda self, note: self.on_message(note)


OTHERS = {
    "a ledger that drops its last line": Mistake(
        check_a_lost_line_end, ledger, "_is_entry", only_whole_lines
    ),
    "people without a name as one unit": Mistake(
        check_everyone_has_a_name, _validate, "owners", nobody_is_missing
    ),
    "batch sizes and times in a job's output": Mistake(
        check_a_jobs_output, progress, "_event", says_everything
    ),
    "notes of the data in a job's output": Mistake(
        check_a_jobs_output_has_no_notes_of_the_data,
        progress.JsonLinesReporter,
        "on_non_private_note",
        printed_as_messages,
    ),
    "an accountant with half the rate": Mistake(
        check_second_accountant, accounting, "_on_grid", half_the_rate
    ),
    "an array that may call anything": Mistake(
        check_arrays_run_nothing, npz.NpzFile, "read", trusting
    ),
    "a model file that may call anything": Mistake(
        check_files_run_no_code, meaning, "names_code", no_code_at_all
    ),
}

CLAIMS = {
    "sensitivity": sensitivity_claims.MISTAKES,
    "gradients": gradient_claims.MISTAKES,
    "noise": noise_claims.MISTAKES,
    "noise, closely": scale_claims.MISTAKES,
    "random bits": bits_claims.MISTAKES,
    "schedules": schedule_claims.MISTAKES,
    "post-processing": post_processing.MISTAKES,
    "rounding": rounding_claims.MISTAKES,
    "ranks": rank_claims.MISTAKES,
    "reading": reading_claims.MISTAKES,
    "owners": owner_claims.MISTAKES,
    "sampling and accounting": accounting_claims.MISTAKES,
    "a ledger's file": ledger_claims.MISTAKES,
    "what the oracle is handed": handover_claims.MISTAKES,
    "code of the user's": own_code_claims.MISTAKES,
    "interruptions": interruption_claims.MISTAKES,
    "first use": first_use_claims.MISTAKES,
    "generators": generator_claims.MISTAKES,
    "the closed-form head": head_claims.MISTAKES,
    "before the first step": first_release_claims.MISTAKES,
    "what is published": publishing_claims.MISTAKES,
}
GALLERY: dict[str, dict[str, Mistake]] = {
    **CLAIMS,
    "audit": AUDITED,
    "secure noise": SECURE,
    "accountant and files": OTHERS,
}
