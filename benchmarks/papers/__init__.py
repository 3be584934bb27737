"""Published ablations in small: each re-runs a paper's own comparison on real bytes, beside the figures that it published.

papers         which there are, without torch
outcome        what each returns: tables, figures, and how its set-up differs from the paper's
run            the table printed, JSON and a plot written
coat, eight_bit, loss_scaling, few_bit, gact, jetfire      one paper each
"""
