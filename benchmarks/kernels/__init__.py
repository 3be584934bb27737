"""The registry's part ``kernels``: one kernel or a few, beside the same work of others."""
