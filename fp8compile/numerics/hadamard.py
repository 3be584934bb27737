"""A Hadamard transform along the contracted dimension of a product, in blocks of 16: HOT (CVPR 2025) has it before INT8.

    x' w = (H x)' (H w)        H = diag(H_16, H_16, ...),  H_16 [16, 16] has elements +-1/4,  H_16' H_16 = I

Both operands are rotated alike, so that their product stays as it is, and are encoded after that; a Hadamard transform is a
rotation, as QuaRot (Ashkboos et al. 2024) has it. A value that is larger than its neighbours is spread over 16 of them: an
isolated value v becomes 16 values of |v| / 4. The largest of a line is smaller, and with it the inverse scale of its INT8
codes. Where all values of a line are of a size already, nothing is gained.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDER = 16  # of the Hadamard matrix: values that are rotated together


def rotated(x: Tensor, dim: int) -> Tensor:
    """``H x`` along a dimension of a matrix, in x's dtype, filled up with zeros to whole blocks of 16.

    ``x [R, C]``, dim 0 gives ``[ceil(R / 16) 16, C]``; dim 1 the transpose's.
    """
    if dim == 1:
        return rotated(x.t(), 0).t()
    rows, columns = x.shape
    if rows % ORDER:
        x = torch.nn.functional.pad(x, (0, 0, 0, -rows % ORDER))
    blocks = x.reshape(-1, ORDER, columns)
    h = hadamard(x.device).to(x.dtype).expand(blocks.shape[0], ORDER, ORDER)
    return torch.bmm(h, blocks).reshape(-1, columns)


def hadamard(device: torch.device | None = None) -> Tensor:
    """``H_16``, FP32: element i, j is 1/4 by -1 to the power of the number of bits that i and j share."""
    i = torch.arange(ORDER, device=device)
    shared = i.unsqueeze(1) & i
    shared = shared ^ (shared >> 2)
    odd = (shared ^ (shared >> 1)) & 1
    return (1 - 2 * odd).float() * 0.25
