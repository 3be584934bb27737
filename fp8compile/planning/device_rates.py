"""What devices reach, one row each: rates assumed by predictions and by ``Recipe.linear = "auto"``. Nothing here was measured
by this project.

    rate = share * peak     of the data sheet's dense peak, without sparsity

Peaks: NVIDIA's data sheets of H100 SXM, H200 and B200 (TFLOP/s with sparsity, halved here), AMD's of MI300X. Shares, assumed
for the H100 and taken for the others too: 3.0 of 3.35 TB/s, 650 of 989 TFLOP/s in BF16, 1150 of 1979 in FP8.
Attention was measured by Shah et al. 2024 (arXiv 2407.08608) on an H100, head dimension 128, 8,192 tokens: FlashAttention-2,
torch's scaled_dot_product_attention there by default, 370 TFLOP/s forward and 318 backward; FlashAttention-3 646 and 559
(pytorch/benchmark #2391 has 614 forward). Other devices get them by their BF16 peak. The gap between kernels is assumed.
The link to the host is PCIe 5.0 with 16 lanes for all of them, 63 GB/s each way by its specification; 50 are assumed, as by
torch (``torch._functorch.config.activation_offload_cpu_gpu_bw``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

COPY, BF16, FP8 = 3.0 / 3.35, 650 / 989, 1150 / 1979  # shares of the peak that an H100 is assumed to reach
ATTENTION = {"FA2": (370 / 989, 318 / 989), "FA3": (646 / 989, 559 / 989)}  # forward and backward, of the BF16 peak
GAP = 1.5
LINK = 50.0
TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True)
class DeviceRates:
    """What a device is assumed to reach.

    Attributes:
        name: of the device.
        copy: memory, TB/s.
        bf16: matmuls of 16-bit values, TFLOP/s.
        fp8: matmuls of FP8 codes, TFLOP/s.
        attention: attention's forward, TFLOP/s.
        attention_backward: its backward, TFLOP/s.
        gap: between two kernels, microseconds.
        link: to pinned memory of the host, each way, GB/s.
    """

    name: str
    copy: float
    bf16: float
    fp8: float
    attention: float
    attention_backward: float
    gap: float = GAP
    link: float = LINK

    def microseconds(self, operations: float, rate: float, num_bytes: float) -> float:
        """A kernel by a roofline: max(operations / rate, bytes / copy) + gap; ``rate`` in TFLOP/s."""
        return max(operations / (rate * TERA), num_bytes / (self.copy * TERA)) / MICRO + self.gap

    def microseconds_to_host(self, num_bytes: float) -> float:
        """A copy to pinned memory of the host, or back from it."""
        return num_bytes / (self.link * GIGA) / MICRO


def _of_peaks(name: str, copy: float, bf16: float, fp8: float) -> DeviceRates:
    forward, backward = (share * bf16 for share in ATTENTION["FA2"])
    return DeviceRates(name, COPY * copy, BF16 * bf16, FP8 * fp8, forward, backward)


RATES: Mapping[str, DeviceRates] = {
    "h100": _of_peaks("H100", 3.35, 989, 1979),
    "h200": _of_peaks("H200", 4.8, 989, 1979),
    "b200": _of_peaks("B200", 8.0, 2250, 4500),
    "mi300x": _of_peaks("MI300X", 5.3, 1307, 2615),
}


def rates_named(device_name: str) -> DeviceRates | None:
    """The rates of the device that a driver calls so ("NVIDIA H100 80GB HBM3"); None where this file has none."""
    words = device_name.lower().replace("-", " ").split()
    return next((rates for name, rates in RATES.items() if name in words), None)


def with_attention(rates: DeviceRates, kernel: str) -> DeviceRates:
    """These rates with attention by "FA2" or "FA3", at their share of the device's BF16 peak."""
    forward, backward = (share * rates.bf16 / BF16 for share in ATTENTION[kernel])
    return replace(rates, attention=forward, attention_backward=backward)
