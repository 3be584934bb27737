"""Tests that only ``make sweep`` runs although nothing in them is a sweep: each takes long, and CI has one of its kind.

Patterns of fnmatch on test ids; ``[`` stands for itself.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

SLOW = (
    "tests/amp/test_every_gradient.py::test_checkpointed_layers_are_counted_as_others_are",
    "tests/amp/test_every_gradient.py::test_no_scaled_gradient_beyond_the_edge[False]",
    "tests/analysis/ranges/test_relations.py::test_joint_graph_of_a_layer",
    "tests/benchmarks/test_bench.py::test_every_benchmark_runs[attention_storage]",
    "tests/benchmarks/test_bench.py::test_every_benchmark_runs[capacity]",
    "tests/benchmarks/test_bench.py::test_every_benchmark_runs[layer]",
    "tests/benchmarks/test_bench.py::test_every_benchmark_runs[training_step]",
    "tests/benchmarks/test_parity.py::test_parity_goes_on_from_its_checkpoint",
    "tests/cli/test_process.py::test_the_whole_traceback_is_there_for_who_asks",
    "tests/compiler/test_apart.py::test_the_backward_of_a_checked_step_overwrites_nothing[changes0]",
    "tests/compiler/test_dump.py::test_equal_files_from_two_processes_cold_and_warm[static]",
    "tests/compiler/test_nothing_compiled.py::test_at_the_end_of_a_program[called, and an error ends the program]",
    "tests/compiler/test_nothing_compiled.py::test_at_the_end_of_a_program[never called, another backend compiled]",
    "tests/compiler/test_regions.py::test_gradients[BBB-False]",
    "tests/compiler/test_regions.py::test_gradients[BOBOB-False]",
    "tests/compiler/test_regions.py::test_products_and_bytes_are_those_of_the_model_without_regions[BOBOB-*",
    "tests/demo/test_fp16.py::test_a_run_of_the_benchmark[static*",
    "tests/encoding/test_saved_format.py::test_gradients_of_a_resnet_are_no_worse_than_in_either_format",
    "tests/islands/test_islands.py::test_an_unstable_block_trains_with_keep_fp32",
    "tests/islands/test_islands.py::test_at_most_a_quarter_of_a_linear_attention_layer_is_widened",
    "tests/islands/test_islands.py::test_healthy_models_are_left_alone",
    "tests/islands/test_islands.py::test_in_every_form[*-2-D]",
    "tests/numerics/states/test_compiled.py::test_compiled_codecs_are_bit_equal_to_eager[tails]",
    "tests/numerics/states/test_dither.py::test_codes_that_only_decay_stay_as_they_are[0.99-*",
    "tests/numerics/states/test_split_weights.py::*float16]",
    "tests/numerics/test_codecs_compiled.py::test_compiled_codec_is_bit_equal_to_eager[e5m2 rowwise]",
    "tests/numerics/test_codecs_compiled.py::test_compiled_codec_is_bit_equal_to_eager[int8 1x64]",
    "tests/numerics/test_codecs_compiled.py::test_one_dynamic_graph_*[best of*",
    "tests/numerics/test_few_bits_compiled.py::test_compiled_it_gives_the_same_bits[2*",
    "tests/numerics/test_few_bits_compiled.py::test_compiled_it_gives_the_same_bits[3*",
    "tests/numerics/test_rounding.py::test_generated_triton_is_bit_equal_to_eager",
    "tests/observe/test_overflow_dtypes.py::*[bf16 with FP8 linears]",
    "tests/observe/test_overflow_dtypes.py::*[f32 with FP8 linears]",
    "tests/observe/test_slot.py::test_a_warm_cache_gives_the_same_rows_and_counts",
    "tests/observe/test_slot.py::test_counts_equal_those_of_eager_hooks_exactly[0.000244140625-*",
    "tests/observe/test_slot.py::test_counts_equal_those_of_eager_hooks_exactly[16384.0-*",
    "tests/optim/test_compress.py::test_fifty_steps_are_ours_bit_for_bit[AdamW-lr-*",
    "tests/optim/test_step_codes.py::test_codes_are_those_of_the_stored_weight[(32, 208)-(torch.bfloat16*True]",
    "tests/passes/test_copy_overwritten.py::test_gradients_are_those_of_eager[off-inductor-*",
    "tests/passes/test_observe_gradients.py::test_what_is_kept_for_the_backward_is_the_same_but_for_the_counts_of_the_forward",
    "tests/passes/test_quantize_linears_blocks.py::test_blocks_run_along_*[mxfp8-(300, 144, 80)-inductor]",
    "tests/passes/test_quantize_linears_blocks.py::test_blocks_run_along_*[mxfp8-(40, 48, 16)-inductor]",
    "tests/passes/test_store_residuals.py::test_no_norm_reads_the_results_of_all_matmuls_before_it_*",
    "tests/recipe/test_calibration.py::test_a_module_can_leave_a_calibration_but_not_bring_one",
    "tests/reporting/test_memory.py::test_it_predicts_what_is_there_after_a_step[partly_frozen]",
    "tests/reporting/test_memory.py::test_it_predicts_what_is_there_after_a_step[tied_llama]",
    "tests/reporting/test_report.py::test_a_first_screen_is_short_whatever_the_depth[80]",
    "tests/sm90/test_step_codes_sm90.py::*[BF16, rounded stochastically]",
    "tests/sm90/test_storage_sm90.py::test_a_whole_block*",
    "tests/sm90/test_storage_sm90.py::test_an_input_that_is_kept_costs_one_kernel_each_way",
    "tests/system/test_layer.py::test_a_llama_layer_keeps_at_most_6_units[e4m3-*",
    "tests/system/test_layer.py::test_a_llama_layer_keeps_at_most_6_units[int8-*",
    "tests/system/test_linears.py::test_llama_layers_worst_gradient_against_float64[*attention_format*",
    "tests/system/test_linears.py::test_llama_layers_worst_gradient_against_float64[*saved_format*",
    "tests/system/test_linears.py::test_llama_layers_worst_gradient_against_float64[{'linear': 'rowwise'*",
    "tests/system/test_linears_models.py::test_every_linear_is_told_of_by_path[gpt2]",
    "tests/system/test_linears_models.py::test_every_linear_is_told_of_by_path[qwen3]",
    "tests/system/test_linears_models.py::test_every_linear_is_told_of_by_path[t5]",
    "tests/system/test_linears_models.py::test_sizes_are_those_of_the_weights[gpt2]",
    "tests/system/test_models.py::test_report_is_what_autograd_keeps[t5]",
    "tests/system/test_training.py::test_dropout_masks_are_made_again_from_their_seed",
    "tests/system/test_wrapped.py::test_sharded_parameters_are_parameters[ddp]",
    "tests/system/test_wrapped.py::test_sharded_parameters_are_parameters[fsdp2]",
    "tests/test_surface.py::test_a_submodule_may_come_first",
    "tests/test_surface.py::test_submodules_are_attributes[amp.LossScaler]",
    "tests/tools/test_calibrate.py::test_calibrated_at_batch_2_and_used_at_batch_3[False]",
    "tests/tools/test_calibrate.py::test_calibrated_at_batch_2_and_used_at_batch_3[True]",
    "tests/tools/test_calibrate.py::test_of_a_healthy_layer_all_is_seen_and_nothing_is_unsafe[dtype1]",
)


def matching(test: str) -> list[str]:
    """The patterns that a test's id matches."""
    return [pattern for pattern in SLOW if fnmatchcase(test, pattern.replace("[", "[[]"))]
