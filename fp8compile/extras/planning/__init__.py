"""What a training run would need on each GPU, by arithmetic alone: no torch, no GPU, no measurement of speed.

measured   bytes that one layer saves for backward, as results files have them
models     shapes of Llama-like models, from a count of parameters
layout     FSDP x TP x PP, and how a step's sequences fall on them
bytes      memory of one GPU, part by part
traffic    bytes that one GPU sends in a step
table      all layouts, as rows, text and JSON
"""
