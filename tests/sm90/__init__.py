"""Checks of the Triton that Inductor generates for an H100 (sm_90), made without a GPU.

    lower       kernel count, what fused with what, bytes moved        lowering.py
    assemble    every autotune configuration becomes a cubin           assembling.py
    interpret   indices, masks, rounding, against eager on the CPU     interpreter.py

All of it stands on a mock of ``torch.cuda`` and of Triton's driver (fake_h100.py), which is process-wide
and cannot be undone: Inductor and Triton cache what they ask the device. So pytest never mocks anything in
its own process; the ``run_*.py`` scripts do, each in a process of its own, and hand JSON back
(subprocesses.py).

Not covered: symbolic shapes, max-autotune templates, CUDA graphs; and an interpreter says nothing of races or
speed.
"""
