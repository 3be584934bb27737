"""What a user does with a model: compile_blocks, explain, calibrate, check, debug_step, set_recipe."""
