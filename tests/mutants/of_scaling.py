"""Faults in delayed scaling, and in codes of weights that are kept."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NUMBERS = ("tests/numerics/test_delayed.py",)
TRAINING = "tests/linears/test_delayed.py"
STARVED = ("tests/linears/test_starved_operands.py",)
CACHED = "tests/linears/test_cached_weights.py"
CHANGES = "tests/linears/test_weight_changes.py"
MERGED = "tests/linears/test_merged_dgrads.py"
NUMBERS_OF_MERGED = "tests/linears/test_merged_dgrads_numbers.py"
PACKED = "tests/linears/test_packed_weights.py"
LOWERED = "tests/sm90/test_layers_sm90.py"

ROW_BLOCKS = ("tests/linears/test_row_blocks.py",)

SCALING = (
    Mutant(
        "merged dgrads: a gradient meets another weight's scale",
        "fp8compile/numerics/balance.py",
        "(g * (w / own)).clamp_max(largest) for own in weights",
        "(g * (w / weights[0])).clamp_max(largest) for own in weights",
        ("tests/numerics/test_balance.py",),
    ),
    Mutant(
        "merged dgrads: a weight of zeros makes a scale infinite",
        "fp8compile/numerics/balance.py",
        ".clamp_max(largest)",
        "",
        ("tests/numerics/test_balance.py",),
    ),
    Mutant(
        "merged dgrads: weights that are multiplied as they lie are taken transposed",
        "fp8compile/linears/merged_dgrads.py",
        "any(is_across(_weight_of(each)[2]) for each in members) or ",
        "",
        (MERGED,),
    ),
    Mutant(
        "merged dgrads: what else is added is lost",
        "fp8compile/linears/merged_dgrads.py",
        "(*others, y))",
        "(y,))",
        (NUMBERS_OF_MERGED,),
    ),
    Mutant(
        "merged dgrads: clipping is counted under the balanced scale",
        "fp8compile/linears/known_scales.py",
        "key=lambda node: BALANCED not in node.meta",
        "key=lambda node: BALANCED in node.meta",
        (NUMBERS_OF_MERGED,),
    ),
    Mutant(
        "merged dgrads: a partial sum that is read elsewhere counts as inside",
        "fp8compile/analysis/sums.py",
        "return users[0] if len(users) == 1 and",
        "return users[0] if users and",
        ("tests/analysis/test_sums.py",),
    ),
    Mutant(
        "packed weights: a pack outlives a change of its second weight",
        "fp8compile/linears/packed_weights.py",
        "all(made() is each and version == each._version for (made, version), each in pairs)",
        "self.made_of[0][0]() is codes[0]",
        (PACKED,),
    ),
    Mutant(
        "packed weights: a change fills the pack that a backward still reads",
        "fp8compile/linears/packed_weights.py",
        "            kept[key] = _Pack(made_of, side_by_side(codes), largest)",
        "            packed = side_by_side(codes)\n"
        "            packed = kept[key].packed.copy_(packed) if key in kept else packed\n"
        "            kept[key] = _Pack(made_of, packed, largest)",
        (PACKED,),
    ),
    Mutant(
        "row kernels: the scale of a merged dgrad is taken for a kernel of rows",
        "fp8compile/compiler/row_kernels.py",
        " and not _is_one_number(made.defining_op)",
        "",
        (LOWERED,),
    ),
    Mutant(
        "observe: inputs that hold codes are watched",
        "fp8compile/observe/selection.py",
        "or ctx.is_own_input(root) or not",
        "or ctx.is_scales(root) or not",
        (MERGED,),
    ),
    Mutant(
        "row kernels: codes are stored a byte at a time",
        "fp8compile/compiler/row_kernels.py",
        "return any(map(_stores_across, stores.get_nodes())) and",
        "return False and",
        (LOWERED,),
    ),
    Mutant(
        "row kernels: codes are made anew beside the kernel that makes them",
        "fp8compile/linears/operands.py",
        "copies = how.role == GRADIENT and",
        "copies = False and how.role == GRADIENT and",
        ("tests/linears/test_operands.py",),
    ),
    Mutant(
        "row kernels: a backward is compiled without the rule",
        "fp8compile/compiler/row_kernels.py",
        "return fusing_only_where(_stores_in_tiles)(inner_compile)",
        "return inner_compile",
        ("tests/compiler/test_row_kernels.py",),
    ),
    Mutant(
        "delayed: saturation hides an inf",
        "fp8compile/numerics/delayed.py",
        "torch.where(x.abs() < torch.inf, scaled.clamp",
        "torch.where(x.abs() <= torch.inf, scaled.clamp",
        NUMBERS,
    ),
    Mutant(
        "delayed: clipping counted from the largest code on",
        "fp8compile/numerics/delayed.py",
        "return fmt.max + step / 2",
        "return fmt.max",
        NUMBERS,
    ),
    Mutant(
        "delayed: an amax that is not finite is remembered",
        "fp8compile/numerics/delayed.py",
        "(amax < torch.inf) & ~(lost",
        "~(lost",
        NUMBERS,
    ),
    Mutant(
        "delayed: an amax of 0 pushes others out",
        "fp8compile/numerics/delayed.py",
        "torch.where(first > 0, torch.where",
        "torch.where(first >= 0, torch.where",
        NUMBERS,
    ),
    Mutant(
        "delayed: nobody waits for an operand that is unknown",
        "fp8compile/linears/history.py",
        "self._due | (is_unknown(amaxes) & (ago < most)).any()",
        "self._due",
        STARVED,
    ),
    Mutant(
        "delayed: a later backward takes back that a step must measure",
        "fp8compile/linears/history.py",
        "self._due | fell_back.any()",
        "fell_back.any()",
        STARVED,
    ),
    Mutant(
        "delayed: a spike stays in the history",
        "fp8compile/numerics/delayed.py",
        "torch.where(fell_back[:, None], alone, pushed)",
        "pushed",
        NUMBERS,
    ),
    Mutant(
        "delayed: the gradients' statistics stand first",
        "fp8compile/numerics/delayed.py",
        "(is_late * half, 2 * half - is_late * half - part.shape[0])",
        "(half - is_late * half, half + is_late * half - part.shape[0])",
        NUMBERS,
    ),
    Mutant(
        "row_blocks: values that depend on sums of their rows are taken in blocks too",
        "fp8compile/linears/row_blocks.py",
        "if any(map(is_reduction, computed_from(value))):",
        "if False:",
        ROW_BLOCKS,
    ),
    Mutant(
        "row_blocks: other sums of a gradient do not matter",
        "fp8compile/linears/row_blocks.py",
        "if len(over_rows) == len(sums) else RowBlocks(reason=OTHER_SUMS)",
        "if over_rows else RowBlocks(reason=OTHER_SUMS)",
        ROW_BLOCKS,
    ),
    Mutant(
        "known_scales: blocks are counted with the width of a row",
        "fp8compile/linears/known_scales.py",
        '[value.meta["val"].shape[_dim(row, value)] for',
        '[value.meta["val"].shape[-1] for',
        ROW_BLOCKS,
    ),
    Mutant(
        "sum_bias_gradients: given blocks are taken whether they divide the rows or not",
        "passes/sum_bias_gradients.py",
        "whole = sums_over_rows(node, seen.shape[-1]) and in_blocks(value, seen.shape[-1], blocks)",
        "whole = sums_over_rows(node, seen.shape[-1])",
        ("tests/passes/test_sum_bias_gradients.py",),
    ),
    Mutant(
        "known_scales: every operand has the first one's scale",
        "fp8compile/linears/known_scales.py",
        "scales.narrow(0, index, 1)",
        "scales.narrow(0, 0 * index, 1)",
        (f"{TRAINING}::test_histories_are_the_reference_s_over_fifty_steps",),
    ),
    Mutant(
        "measure_operands: statistics in the order of the graph, rows in another",
        "passes/measure_operands.py",
        "own.sort(key=lambda operand: (rows_in(operand), operand[0].index))",
        "own.sort(key=lambda operand: -operand[0].index)",
        ("tests/passes/test_measure_operands.py", TRAINING),
    ),
    Mutant(
        "slot: two calls share a leaf",
        "fp8compile/linears/slot.py",
        "leaf = histories.scales.detach().requires_grad_()",
        "leaf = histories.scales.requires_grad_()",
        (f"{TRAINING}::test_two_calls_in_one_backward_are_two_entries",),
    ),
    Mutant(
        "history: a step that clipped is followed by one with known scales",
        "fp8compile/linears/history.py",
        "PendingBool(self._due | (is_unknown(amaxes)",
        "PendingBool((is_unknown(amaxes)",
        (f"{TRAINING}::test_a_jump_is_seen_and_the_next_step_takes_its_own_scales",),
    ),
    Mutant(
        "state: who fell back is not saved",
        "fp8compile/linears/history.py",
        'self.fell_back, self._due = state["fell_back"].to(device), state["fell_back"].any().to(device)',
        "pass",
        ("tests/linears/test_delayed_state.py::test_a_state_saved_behind_a_jump_goes_on_measuring",),
    ),
    Mutant(
        "apart: the second compilation shares the first one's context",
        "fp8compile/compiler/apart.py",
        "private.tracing(copy.copy(context))",
        "private.tracing(context)",
        ("tests/compiler/test_apart.py",),
    ),
    Mutant(
        "cached weights: trusted before a change was seen to count",
        "fp8compile/linears/weight_changes.py",
        "and (self.noticed or not weight.requires_grad)",
        "and True",
        (f"{CHANGES}::test_a_loop_through_data_is_never_trusted",),
    ),
    Mutant(
        "cached weights: the address is not looked at",
        "fp8compile/linears/weight_changes.py",
        "return (self._version, self._address) == (weight._version, weight.data_ptr())",
        "return self._version == weight._version",
        (CHANGES,),
    ),
    Mutant(
        "cached weights: steps of optimizers are told of to nobody",
        "fp8compile/linears/weight_codes.py",
        "one.watched.stepped()",
        "pass",
        (CHANGES,),
    ),
    Mutant(
        "cached weights: samples of one column",
        "fp8compile/linears/weight_changes.py",
        "flat[:: -(-flat.numel() // SAMPLES) | 1]",
        "flat[:: -(-flat.numel() // SAMPLES)]",
        (f"{CHANGES}::test_weights_are_looked_at_in_each_column_and_bit_by_bit",),
    ),
    Mutant(
        "cached weights: who changed unseen is trusted again",
        "fp8compile/linears/weight_changes.py",
        "return self.is_the_same(weight) and not self.distrusted and",
        "return self.is_the_same(weight) and",
        (CHANGES,),
    ),
    Mutant(
        "cached weights: a graph that needs the other layout alone drops the first one's",
        "fp8compile/linears/weight_codes.py",
        "self.layouts |= layouts",
        "self.layouts = layouts",
        (f"{CACHED}::test_graphs_that_take_other_layouts_share_both",),
    ),
    Mutant(
        "cached weights: transposed codes taken for codes",
        "fp8compile/linears/cached_weights.py",
        "CODES if across == by_columns else TRANSPOSED",
        "CODES if across != by_columns else TRANSPOSED",
        (f"{CACHED}::test_both_layouts_of_codes_are_those_that_scaled_mm_takes",),
    ),
    Mutant(
        "cached weights: every graph's weights have the first weight's inputs",
        "fp8compile/linears/weight_slot.py",
        "first + len(NAMES) * i) for i, at",
        "first + 0 * i) for i, at",
        (f"{CACHED}::test_losses_and_gradients_are_those_without_a_cache[plain]",),
    ),
    Mutant(
        "step codes: the bound forgets the old momentum",
        "fp8compile/numerics/step_bounds.py",
        "(old * old / beta2 + rests[0] * rests[0] / rests[1])",
        "(rests[0] * rests[0] / rests[1])",
        ("tests/numerics/test_step_bounds.py",),
    ),
    Mutant(
        "step codes: rounding for storage is not allowed for",
        "fp8compile/numerics/step_bounds.py",
        "bound = bound * (1 + 2.0**-grid.mantissa) + smallest",
        "bound = bound + smallest",
        ("tests/numerics/test_step_bounds.py",),
    ),
    Mutant(
        "step codes: a BF16 state's reach is of what it was rounded from",
        "fp8compile/optim/plan.py",
        "if tensors[first[state]].dtype == torch.bfloat16 else x",
        "if False else x",
        ("tests/optim/test_step_codes.py::test_reach_is_that_of_the_states_as_they_are_stored",),
    ),
    Mutant(
        "step codes: what was measured is taken after any change",
        "fp8compile/optim/code_writer.py",
        "and self._seen.get(p) == self._as_it_is(p)",
        "and True",
        ("tests/optim/test_step_codes.py::test_changes_between_steps_are_measured",),
    ),
    Mutant(
        "step codes: taken over though the weight has changed",
        "fp8compile/optim/exchange.py",
        "return found if found is not None and found.seen == seen(weight) else None",
        "return found",
        ("tests/linears/test_written_codes.py::test_a_change_is_seen",),
    ),
    Mutant(
        "step codes: another optimizer's step goes unnoticed",
        "fp8compile/optim/exchange.py",
        "if found is not None and found.optimizer != optimizer:",
        "if False and found is not None:",
        ("tests/linears/test_written_codes.py::test_a_change_is_seen",),
    ),
    Mutant(
        "step codes: nobody asks what was clipped",
        "fp8compile/optim/code_writer.py",
        "known.select(0, 0) > E4M3.max * inv_scale.reshape(())",
        "known.select(0, 0) > torch.inf * inv_scale.reshape(())",
        (
            "tests/linears/test_written_codes.py::test_a_jump_through_data_that_no_one_counts_clips_and_is_seen_and_distrusted",
        ),
    ),
    Mutant(
        "step codes: scales of a checkpoint are trusted unseen",
        "fp8compile/optim/code_writer.py",
        "return torch.where(near, found.known, measured)",
        "return found.known",
        ("tests/linears/test_written_codes.py::test_wrong_scales_from_a_checkpoint_are_not_taken",),
    ),
)
