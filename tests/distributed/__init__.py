"""torch.distributed by gloo: each mode against one process that does the same arithmetic, checkpoints, faults, recipes."""
