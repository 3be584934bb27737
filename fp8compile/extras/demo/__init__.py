"""The demo: a small Llama trained on Python's own source, once per arm, and the results.

    data       which bytes, which are held out, in which order
    model      which Llama, how large, how trained
    precision  16 bit or FP32, and why; fp16_cost: why FP16 is refused where it takes hours
    estimate, opening    how long it takes, and what is printed before it begins
    arms       their names, known without torch
    compiling  what compiles the model in each arm
    saved_bytes  bytes that a step saves for backward (tools/step_memory.py)
    loop       the training loop of one arm; turns: all arms of a seed in short blocks of steps
    memory     what one arm takes of a GPU that several share
    results    what a run measured, and the gap between arms
    eta        the time left
    progress   what is on screen during the training
    table, loss_curve, plots, output_files    what is read afterwards
    run        all of it, in order

Numbers change only through the arm: every arm sees the same initial weights, batches and optimizer.
"""
