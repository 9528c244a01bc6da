"""Every promise of docs/privacy.md: what tests it, and the mistakes that the test must fail on.

``python tests/claims/promises.py`` prints the table that the site shows on its page of guarantees.
The mistakes are those of the gallery whose check is named here; a few promises have negative
controls of their own.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS)]

from gallery import AUDITED, GALLERY, SECURE  # noqa: E402

from planting import Mistake  # noqa: E402


class Promise(NamedTuple):
    """What is promised, the names of what tests it, and of negative controls of its own."""

    says: str
    tested_by: tuple[str, ...]
    controls: tuple[str, ...] = ()


PROMISES = (
    Promise("a direction depends on its unit alone; the clip bounds what is summed, for every "
            "method, engine and kind of clipping",
            ("test_one_unit_moves_the_sum_by_at_most_c", "check_of", "parts_of",
             "check_a_row_is_alone_in_the_fused_engine",
             "check_batch_norm_is_refused", "check_a_pass_writes_to_no_parameter",
             "check_a_pass_assigns_no_parameter", "check_a_pass_permutes_no_parameter",
             "check_a_pass_writes_to_no_buffer", "check_a_loss_writes_to_no_parameter",
             "check_later_steps_write_to_no_parameter")),
    Promise("one unit moves the moments of the closed-form head by at most their bound, jointly, "
            "and the release is charged as it is noised",
            ("check_one_unit_moves_the_moments_by_at_most_the_bound",
             "check_one_patient_moves_the_moments_by_at_most_the_bound",
             "check_the_release_is_charged_as_it_is_noised",
             "check_an_attack_comes_near_the_claim_and_not_beyond")),
    Promise("one unit moves what is released before the first step, class counts and the centre of "
            "features, by at most its bound, jointly, and it is charged as it is noised",
            ("check_one_unit_moves_the_first_release_by_at_most_the_bound",
             "check_the_first_release_is_charged_as_it_is_noised",
             "check_the_first_release_passes_the_mechanism")),
    Promise("a method of the user's own: its direction is what is summed, as it was measured, and "
            "carries nothing to another unit or into the model",
            ("check_the_direction_in_force_is_summed",
             "check_a_direction_is_summed_as_it_was_measured",
             "check_a_method_writes_nothing_into_the_model",
             "check_a_method_carries_nothing_from_unit_to_unit",
             "check_slots_keep_nothing", "check_nested_functions_keep_nothing",
             "check_the_state_of_a_method_is_what_was_released")),
    Promise("what is read of a record depends on the record and its own key alone",
            ("check_the_draws_of_a_record_are_its_own",
             "check_the_draws_change_from_step_to_step",
             "check_a_record_that_draws_changes_no_seed_of_others",
             "check_the_collate_function_sees_one_record",
             "check_reading_leaves_the_generators_alone",
             "test_a_record_does_not_decide_names_types_or_shapes")),
    Promise("what a loss, or a pass in eval mode, keeps of the records reaches no step",
            ("test_loss_that_counts_its_calls_is_refused",
             "test_what_eval_mode_keeps_of_the_training_data_reaches_no_step"),
            ("test_loss_that_counts_its_calls_would_exceed_the_bound",
             "test_a_second_pass_would_reach_the_step_through_the_model")),
    Promise("no record is seen before the guard: memory is measured, and a model is first used, on "
            "rows without a record",
            ("check_no_number_is_fixed_by_a_record_where_memory_is_measured",
             "check_no_number_is_fixed_by_a_record_where_the_rows_are_given",
             "check_no_record_chooses_the_engine",
             "test_a_model_that_changes_engines_by_its_first_use_is_refused",
             "test_a_number_in_an_object_that_the_code_names_is_refused_by_name",
             "test_the_measured_loss_does_not_fix_a_number"),
            ("test_a_second_pass_would_fix_a_number",)),
    Promise("no pass moves a global generator of random numbers, which would count the records",
            ("check_no_pass_moves_a_generator", "check_no_pass_moves_the_generator_of_torch",
             "test_a_refused_pass_leaves_the_global_generators_as_they_were")),
    Promise("views and records are averaged before the clip",
            ("check_views_are_averaged_before_the_clip", "check_a_unit_is_the_mean_of_its_rows")),
    Promise("65,536 aligned gradients: one moves the computed sum by at most C (1 + 2^-11)",
            ("check_many_physical_batches", "check_one_physical_batch",
             "check_factors_of_float64")),
    Promise("norms do not vanish in half precision", ("check_half_precision_norms",)),
    Promise("NaN and infinity contribute zero",
            ("check_bad_samples_vanish", "check_bam_at_a_zero_gradient")),
    Promise("whether a unit counts does not depend on the others: numbers whose products could "
            "overflow count as infinite",
            ("test_an_input_near_overflow_counts_or_not_whatever_the_others_are", "check_of")),
    Promise("DP-SAT's ascent is public, and undone exactly", ("check_dp_sat",)),
    Promise("a unit enters a step once",
            ("check_a_sample_enters_once", "check_a_record_is_one_unit_in_any_wrapping")),
    Promise("noise of deviation sigma C on every coordinate, once, whatever the batch",
            ("check_scale",)),
    Promise("a sum that would get no noise is refused before a charge",
            ("check_a_sum_without_noise_is_refused",)),
    Promise("its scale to 2%, its tails beyond 3 sigma, parameters of one element; standard and "
            "secure", ("check_scale_and_tails", "check_far_tails", "check_one_element_parameters")),
    Promise("no sum without noise outlives its step, in the oracle or in a file of it",
            ("check_no_sum_without_noise_outlives_its_step", "check_the_memory_of_sums_has_none",
             "check_no_statistic_without_noise_outlives_its_step",
             "check_no_statistic_outlives_a_refused_step")),
    Promise("noise is independent across parameters, steps, resumes",
            ("check_independence", "check_resume_draws_anew", "check_own_generator",
             "check_secure_noise_is_new")),
    Promise("where sigma, C or the noise change over a training, each step is charged as noised",
            ("check_each_step_is_charged_as_noised", "check_an_adaptive_clip_is_charged_as_noised",
             "check_a_noise_of_the_users_own_is_charged_as_it_states")),
    Promise("filters, history and the corrected optimiser see what was released and charged, and "
            "public facts",
            ("check_parts_see_what_was_released", "check_a_filter_sees_what_was_released",
             "check_every_filter_is_a_function_of_what_was_released",
             "check_the_corrected_variance_is_that_of_the_noise")),
    Promise("batches, steps and clipping factors are the plan's, or refused before a charge",
            ("check_a_shuffled_loader_is_refused",
             "check_a_shuffled_loader_is_refused_at_once", "check_an_impossible_batch_is_refused",
             "check_records_of_one_owner_count_as_one", "check_a_full_batch_is_full",
             "check_no_step_beyond_the_plan",
             "check_a_batch_is_part_of_one_step",
             "check_ledgers_on_one_file_share_their_batches", "check_a_state_comes_with_its_ledger",
             "check_a_clipping_keeps_its_sensitivity", "check_every_physical_batch",
             "check_bad_units_have_factor_zero",
             "check_a_clipping_does_not_change_the_norms",
             "check_factors_are_those_that_were_measured",
             "check_a_factor_depends_on_its_own_unit",
             "check_an_augmentation_changes_each_row_by_itself",
             "check_the_sensitivity_does_not_follow_the_units",
             "check_a_clipping_of_a_step_is_not_overwritten",
             "check_every_parameter_is_in_a_group")),
    Promise("code of the user's mixes no units and keeps nothing of them, as far as a search finds "
            "it, and stays refused once it was; what observers get reaches no release",
            ("check_what_was_refused_stays_refused", "check_a_refused_augmentation_stays_refused",
             "check_what_was_kept_in_a_step_that_failed_is_refused",
             "check_an_augmentation_keeps_nothing", "check_a_method_counts_no_passes",
             "check_a_replaced_function_is_searched", "check_statistics_get_no_handle",
             "check_a_rule_that_counts_units_is_refused",
             "check_a_statistic_above_the_mean_is_refused",
             "check_observers_change_nothing_that_is_released",
             "check_no_observer_is_a_statistic",
             "check_no_observer_writes_into_a_statistic")),
    Promise("draws do not repeat: two million units, ids up to 2^63, a million draws of one key",
            ("check_poisson_draws_do_not_repeat", "check_secure_poisson_draws_do_not_repeat",
             "check_keys_are_distinct", "check_keyed_draws_do_not_repeat")),
    Promise("the sampler is Poisson of the accountant's q, standard and secure",
            ("check_sampling_is_as_accounted", "check_secure_sampling")),
    Promise("a unit is one owner's records, and all of them",
            ("check_groups_are_sampled_as_groups", "check_everyone_has_a_name",
             "check_a_unit_chooses_its_records_by_itself")),
    Promise("the unit is never guessed to the weaker side: a data set that names owners is refused "
            "until the unit is named",
            ("check_a_run_does_not_guess_the_unit", "check_a_loop_does_not_guess_the_unit")),
    Promise("over ranks: the noise is there once, by coordinate, a unit counts once, all step "
            "alike",
            ("check_noise_over_ranks", "check_noise_is_keyed_by_coordinate",
             "check_a_unit_is_on_one_rank", "check_ranks_step_alike",
             "check_ranks_are_at_one_step_with_one_clip")),
    Promise("statistics next to the gradient move by what their noise covers, are charged jointly, "
            "and come after the ledger",
            ("test_sensitivity_of_every_method", "test_sensitivity_with_every_clipping",
             "test_the_ledger_is_charged_jointly_once", "check_every_statistic_is_charged",
             "check_a_statistic_keeps_its_bound", "check_a_statistic_of_one_unit_has_one_column",
             "check_a_statistic_does_not_change_the_norms",
             "test_nothing_is_handed_out_before_the_ledger_has_it",
             "test_an_adversary_gains_what_the_joint_charge_says"),
            ("test_sensitivity_fails_without_the_second_clipping",
             "test_sensitivity_fails_for_counts_below_each_threshold",
             "test_noise_test_fails_on_planted_mistakes",
             "test_two_separate_events_would_under_count",
             "test_the_audit_fails_without_the_second_clipping")),
    Promise("batch sizes, times and notes of the data are not in a job's output "
            "([threat-model.md](threat-model.md) for what stays open)",
            ("check_a_jobs_output", "check_a_jobs_output_has_no_notes_of_the_data")),
    Promise("an empty sample is a step",
            ("check_empty_batches_are_steps", "check_empty_batch_is_noise")),
    Promise("the divisor is public", ("check_division",)),
    Promise("physical batches change nothing",
            ("check_micro_batches", "check_one_mask_for_both_gradients")),
    Promise("every step is charged before it is released",
            ("check_ledger_comes_first", "check_replays", "check_a_replay_has_the_same_gradient",
             "check_a_lost_line_end")),
    Promise("code of the user that raises, or Ctrl-C: before the charge nothing is spent, after it "
            "the step is taken and the next one possible, with noise of its own; observers and "
            "filters get copies",
            ("check_what_raises_before_the_charge_costs_nothing",
             "check_what_raises_after_the_charge_leaves_a_step_that_is_taken",
             "check_a_charged_step_is_taken_again_on_resume",
             "check_a_replay_that_is_interrupted_is_replayed",
             "check_an_interrupted_step_leaves_no_record", "check_no_step_begins_inside_another",
             "check_a_mode_that_an_interrupt_leaves_is_switched_off",
             "check_an_interrupt_leaves_theta",
             "check_an_interrupt_at_any_line_leaves_theta",
             "check_observers_and_filters_get_copies")),
    Promise("a ledger's file has one writer at a time, is read again when it grew, and is never "
            "continued without what it held",
            ("check_one_process_writes_at_a_time",
             "check_a_forked_child_does_not_write_for_its_parent",
             "check_a_pickled_copy_in_memory_is_not_charged",
             "check_a_lost_file_is_not_continued", "check_a_deleted_file_is_not_begun_anew",
             "check_a_cut_file_is_not_continued",
             "check_a_reader_changes_nothing",
             "check_an_interrupted_charge_counts_once",
             "check_a_line_counts_once_and_says_one_thing")),
    Promise("in the trainers of Hugging Face and Lightning, what would go past the oracle is "
            "refused; a resumed training keeps what was released after its checkpoint",
            ("test_what_would_go_past_the_oracle_is_refused",
             "test_a_method_set_on_the_trainer_is_refused",
             "test_accumulation_that_a_callback_begins_is_refused",
             "test_resuming_elsewhere_keeps_what_was_released_after_the_checkpoint"),
            ("test_a_step_without_the_oracle_is_refused_before_the_optimiser",
             "test_accumulation_is_noticed_before_the_optimisers_step")),
    Promise("the accountant composes all steps, and calibration stays within the target",
            ("check_accountant_composes_every_step", "check_calibration",
             "check_small_deltas_are_not_under_counted",
             "check_the_type_of_a_number_changes_no_epsilon",
             "check_the_noise_has_the_scale_that_is_charged",
             "check_no_negative_steps_are_counted",
             "check_second_accountant")),
    Promise("secure noise has the distribution claimed",
            ("check_exact_rounding", "check_on_the_grid")),
    Promise("how a record's direction is rounded depends on that record alone",
            ("check_a_bad_record_leaves_the_others", "check_one_unit_more_leaves_the_others")),
    Promise("at every sigma: sums are not rounded before the noise, and its allowance covers "
            "float32",
            ("check_large_sigma", "check_allowance")),
    Promise("standard noise has a key of 192 bits, and all are used",
            ("check_noise_uses_all_bits_of_its_key",)),
    Promise("secure bits are as many as stated, and all are used",
            ("check_words_have_64_bits", "check_secure_uniform_numbers_have_53_bits",
             "check_keys_have_256_bits")),
    Promise("files from others run no code",
            ("check_arrays_run_nothing", "check_files_run_no_code")),
    Promise("what is published is text: names of classes, columns, files and people are escaped; "
            "the digest of the settings depends on no path",
            ("check_names_are_text", "check_settings_hide_paths",
             "test_no_published_file_of_a_run_obeys_a_name",
             "test_no_command_lets_a_name_control_the_terminal")),
    Promise("a statement is checked against ledger and model before it is signed",
            ("check_what_is_signed_was_checked",)),
    Promise("the statement is the run's: epsilon, attacks, files, settings, signature",
            ("test_an_honest_run_passes",
             "test_a_signature_vouches_for_the_statement_as_it_is"),
            ("test_tampering_is_named",)),
    Promise("all of it together: the audits, [audit.md](audit.md)", ("attack",)),
)  # fmt: skip


def table() -> str:
    """The table, in Markdown, every name a link to its line."""
    rows = [
        (promise.says, _links(promise.tested_by), "; ".join([*_planted(promise)]))
        for promise in PROMISES
    ]
    head = ("promise", "tested by", "planted mistakes, on which the test must fail")
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ("---",) * 3, *rows]) + "\n"


def mistakes(promise: Promise) -> list[tuple[str, str]]:
    """(section, name) of the gallery's mistakes that the promise's checks must catch."""
    return [
        (section, name)
        for section, found in GALLERY.items()
        for name, mistake in found.items()
        if check_name(mistake) in promise.tested_by
    ]


def check_name(mistake: Mistake) -> str:
    """The name of the check; of one that a function makes, that function's."""
    made = mistake.check.__name__ not in functions() and "<locals>" in mistake.check.__qualname__
    return mistake.check.__qualname__.split(".")[0] if made else mistake.check.__name__


def _planted(promise: Promise) -> Iterator[str]:
    for section in dict.fromkeys(section for section, _ in mistakes(promise)):
        names = ", ".join(name for other, name in mistakes(promise) if other == section)
        yield f"[{names}](../{_where(section)})"
    if promise.controls:
        yield _links(promise.controls)


def _where(section: str) -> str:
    """The file and the name of the section's mistakes."""
    found = GALLERY[section]
    for module in (m for m in list(sys.modules.values()) if hasattr(m, "MISTAKES")):
        if module.MISTAKES is found:
            return f"tests/claims/{Path(module.__file__).name}#MISTAKES"
    name = "AUDITED" if found is AUDITED else "SECURE" if found is SECURE else "OTHERS"
    return f"tests/claims/gallery.py#{name}"


def _links(names: tuple[str, ...]) -> str:
    return ", ".join(f"[`{name}`](../tests/{functions()[name]}#{name})" for name in names)


@functools.cache
def functions() -> dict[str, str]:
    """The file of every function at the top level of a test file; the claims' own first."""
    found: dict[str, str] = {}
    for path in sorted(TESTS.rglob("*.py"), key=lambda p: ("claims" not in p.parts, p)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, path.relative_to(TESTS).as_posix())
    return found


if __name__ == "__main__":
    print(table())
