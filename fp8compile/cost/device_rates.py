"""What devices reach, one row each: the rates of predictions and of ``Recipe.linears.mode = "auto"``.

The H200's were read on one (torch 2.11, benchmarks/results/first-contact-h200.json): a copy; the matmuls of a Llama-2-7B
layer in BF16 and in FP8; cuDNN's attention of 4,096 and 8,192 tokens, head dimension 128; the shortest kernels. The others'
are assumed: the same shares of their data sheet's dense peaks, without sparsity (NVIDIA's of H100 SXM and B200, AMD's of
MI300X). "FA2" and "FA3" are FlashAttention as Shah et al. 2024 (arXiv 2407.08608) measured it on an H100, head dimension 128,
8,192 tokens. FP32 matmuls are assumed to reach BF16's share of their peak without TF32, and half of BF16's rate with it. The
link to the host is PCIe 5.0 with 16 lanes for all of them, 63 GB/s each way by its specification; 50 are assumed, as by torch
(``torch._functorch.config.activation_offload_cpu_gpu_bw``). Instructions of generated kernels a second are fitted to kernels
that an H200 was timed on (benchmarks/harness/kernel_time.py), and assumed alike for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

COPY, BF16, FP8 = 4.24 / 4.8, 762 / 989, 1445 / 1979  # shares of its peaks that an H200 reached
ATTENTION = {  # forward and backward, of the BF16 peak
    "cuDNN": (612 / 989, 483 / 989),
    "FA2": (370 / 989, 318 / 989),
    "FA3": (646 / 989, 559 / 989),
}
FP32 = 67.0 * BF16  # of an H100 and an H200
GAP = 2.6
LINK = 50.0
LANES = 25.0
TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True)
class DeviceRates:
    """What a device reaches.

    Attributes:
        name: of the device.
        copy: memory, TB/s.
        bf16: matmuls of 16-bit values, TFLOP/s.
        fp8: matmuls of FP8 codes, TFLOP/s.
        attention: attention's forward, TFLOP/s.
        attention_backward: its backward, TFLOP/s.
        gap: that a kernel takes at least, microseconds.
        link: to pinned memory of the host, each way, GB/s.
        lanes: instructions of generated kernels, all lanes together, 10^12 a second.
        fp32: matmuls of 32-bit values, TFLOP/s.
    """

    name: str
    copy: float
    bf16: float
    fp8: float
    attention: float
    attention_backward: float
    gap: float = GAP
    link: float = LINK
    lanes: float = LANES
    fp32: float = FP32

    def matmul(self, itemsize: int) -> float:
        """Matmuls of values of so many bytes, TFLOP/s."""
        return self.bf16 if itemsize <= 2 else self.fp32

    @property
    def with_tf32(self) -> DeviceRates:
        """These rates where matmuls of FP32 values are TF32's."""
        return replace(self, fp32=self.bf16 / 2)

    def microseconds(self, operations: float, rate: float, num_bytes: float) -> float:
        """A kernel by a roofline: max(operations / rate, bytes / copy) + gap; ``rate`` in TFLOP/s."""
        return max(operations / (rate * TERA), num_bytes / (self.copy * TERA)) / MICRO + self.gap

    def microseconds_to_host(self, num_bytes: float) -> float:
        """A copy to pinned memory of the host, or back from it."""
        return num_bytes / (self.link * GIGA) / MICRO


def _of_peaks(name: str, copy: float, fp32: float, bf16: float, fp8: float) -> DeviceRates:
    forward, backward = (share * bf16 for share in ATTENTION["cuDNN"])
    return DeviceRates(name, COPY * copy, BF16 * bf16, FP8 * fp8, forward, backward, fp32=BF16 * fp32)


RATES: Mapping[str, DeviceRates] = {
    "h100": _of_peaks("H100", 3.35, 67, 989, 1979),
    "h200": _of_peaks("H200", 4.8, 67, 989, 1979),
    "b200": _of_peaks("B200", 8.0, 75, 2250, 4500),
    "mi300x": _of_peaks("MI300X", 5.3, 163, 1307, 2615),
}


def rates_named(device_name: str) -> DeviceRates | None:
    """The rates of the device that a driver calls so ("NVIDIA H100 80GB HBM3"); None where this file has none."""
    words = device_name.lower().replace("-", " ").split()
    return next((rates for name, rates in RATES.items() if name in words), None)


def with_attention(rates: DeviceRates, kernel: str) -> DeviceRates:
    """These rates with attention by "cuDNN", "FA2" or "FA3", at their share of the device's BF16 peak."""
    forward, backward = (share * rates.bf16 / BF16 for share in ATTENTION[kernel])
    return replace(rates, attention=forward, attention_backward=backward)
