"""What a user does with a model: explain, calibrate, check, debug_step, set_recipe."""
