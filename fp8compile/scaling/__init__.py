"""Scales known before their tensors: what a compiled graph remembers of its operands from step to step."""
