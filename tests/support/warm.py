"""Imported before ranks are forked: of what every first compilation costs, a second is paid once instead of on each rank."""

from __future__ import annotations

import torch
from torch import nn

import fp8compile  # noqa: F401

if not torch.backends.cuda.is_built():  # a fork takes no threads along, and autograd has one for each GPU
    run = torch.compile(nn.Linear(16, 16), backend="fp8compile", options={"debug.codegen": "eager"})
    run(torch.randn(16, 16)).sum().backward()
    torch._dynamo.reset()
