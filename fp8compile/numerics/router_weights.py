"""The gradients of y = u * (a W), a row at a time, without y.

    z_sn = u_s sum_k a_sk W_kn        P = dz W'        da_sk = u_s P_sk        du_s = sum_n dz_sn y_sn = sum_k P_sk a_sk

Both sums of du are the same double sum in another order. Both are summed in FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weighed_rows(x_SK: Tensor, weight_S1: Tensor) -> Tensor:
    """Each row times its weight, rounded once, to the rows' own dtype."""
    return (x_SK * weight_S1).to(x_SK.dtype)


def products_of_rows(x_SK: Tensor, y_SK: Tensor, dtype: torch.dtype) -> Tensor:
    """``[S, 1]``: for each row of one the inner product with the other's."""
    return (x_SK.float() * y_SK.float()).sum(-1, keepdim=True).to(dtype)
