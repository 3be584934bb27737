"""``fp8compile.check``: gradients beside exact ones, the cause of a difference, a recipe that repairs it."""
