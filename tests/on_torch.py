"""The contract tests of `fit` that also run with `KERAS_BACKEND=torch`.

What is not here, and why; `torch_contract/` has what it proves:

- steps, layers and losses written in TensorFlow: `test_in_float32`,
  `test_logs_of_a_batch_...`, `test_one_micro_batch_is_plain_...`, `test_the_reported_loss_...`,
  `test_training_is_the_same_...`, most of `test_coupled`, `test_data_and_logs`, `test_draws`
  and `test_losses_by_trying`; all of `test_applies`, `test_self_check` and `test_rollback`;
- float64, in which Keras multiplies matrices in float32: `test_in_float64`;
- `steps_per_execution`, which Keras refuses: `test_executions_...` and
  `test_with_compile_options`, which also expects no warning of `jit_compile`;
- graphs, strategies, sparse rows: `test_tracing`, `test_replicas`, `test_sparse_rows`,
  `test_exact_batch_norm`, `test_cross_microbatch`;
- what Keras does otherwise on torch: its optimizers are of classes made for torch
  (`test_it_is_the_same_object_...`), `model.export` fails in `torch.export` (`test_export`),
  and its logs use what NumPy calls deprecated, which `pytest.warns` does not let pass
  (`test_a_window_longer_than_...`, `test_of_data_whose_end_is_not_known_...`).
"""

from __future__ import annotations

ON_TORCH = {
    "test_buffers": {
        "test_repeated_rows_are_kept_apart_as_in_the_full_batch",
        "test_sums_of_half_precision_are_kept_in_float32",
    },
    "test_coupled": {
        "test_a_loss_that_fails_leaves_nothing_behind",
        "test_no_false_alarm",
    },
    "test_draws": {"test_augmentation"},
    "test_equality": {
        "test_every_way_to_feed_it",
        "test_inputs_without_targets",
        "test_micro_batches_of_different_lengths_are_weighted_by_elements",
        "test_mixed_precision",
        "test_train_on_batch",
        "test_validation",
        "test_validation_split_and_initial_epoch",
    },
    "test_last_window": {
        "test_a_schedule_from_updates_made",
        "test_a_window_that_train_on_batch_left_open_is_applied_by_fit_and_restore",
        "test_an_own_fit_that_trains_and_evaluates_on_other_data_first",
        "test_data_that_ends_too_early",
        "test_data_that_ends_too_early_in_every_epoch",
        "test_evaluation_in_the_middle_of_a_window_does_not_end_it",
        "test_every_batch_is_taken_before_the_data_hears_of_the_end",
        "test_it_is_applied_before_validation_and_the_end_of_the_epoch",
        "test_repeated_fits_leak_nothing",
        "test_steps_per_epoch_is_honoured_exactly",
        "test_training_that_is_stopped_in_the_middle_of_a_window",
    },
    "test_metrics": {
        "test_an_integer_in_the_logs",
        "test_callbacks_fire_once_per_batch_of_the_data",
        "test_metrics_are_reset_between_epochs",
        "test_metrics_that_are_no_means",
        "test_weighted_metrics_and_sample_weights",
    },
    "test_optimizer": {
        "test_an_infinite_micro_batch_skips_the_whole_update",
        "test_clipping_of_variables_of_many_shapes",
        "test_every_built_in_optimizer",
        "test_learning_rate_callbacks",
        "test_settings",
    },
    "test_saving": {
        "test_a_loaded_model_is_plain_and_can_be_accumulated_again",
        "test_callbacks_that_write",
        "test_copies_are_plain",
        "test_it_loads_and_trains_where_bigbatch_is_not_installed",
        "test_killed_and_resumed",
        "test_restore_leaves_nothing_behind",
        "test_saving_in_the_middle_of_a_window_is_warned_of",
    },
    "test_statistics": {
        "test_a_callback_that_comes_in_the_middle_of_training",
        "test_a_model_that_does_not_accumulate",
        "test_a_second_fit_without_them_does_not_log",
        "test_monitor_counts_and_every_logger_has_it",
        "test_monitor_of_a_coupled_loss",
        "test_noise_of_a_coupled_loss",
        "test_one_micro_batch_says_nothing",
    },
    "test_structures": {
        "test_arrays_in_train_on_batch",
        "test_sample_weights_that_come_later",
        "test_the_size_of_micro_batches_is_not_zero",
    },
    "test_what_differs": {
        "test_a_layer_that_is_called_twice_moves_twice",
        "test_every_rank",
        "test_frozen_layers_stay_as_they_are",
        "test_frozen_statistics_normalise_and_do_not_move",
        "test_masked_elements_do_not_count",
        "test_micro_batch_statistics_move_with_every_micro_batch",
        "test_outputs_are_normalised_by_micro_batch",
        "test_pooled_statistics_are_those_of_the_full_batch",
        "test_renorm_is_left_to_keras",
        "test_statistics_are_valid_in_the_middle_of_a_window",
    },
}
