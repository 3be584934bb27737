"""Optimizers whose states are FP8. None in this release: the room is kept."""
