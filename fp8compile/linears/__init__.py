"""Linears in FP8: what becomes of each matmul (``plan``), operands and products in codes, and what is kept from step to step:
scales (``slot``) and codes of weights (``weight_slot``)."""
