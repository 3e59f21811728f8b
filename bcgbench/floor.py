"""The least time that a denoise can take: its FLOPs over what the GPU can do at most. A time below it was not measured.

Here: the peaks, and the floor of a record. Not here: counting FLOPs (`flops.py`), the verdict (`verdict.py`).
"""

from __future__ import annotations

from bcgbench.types import Record

PEAK_TFLOPS: dict[str, float] = {
    "B300": 2500, "B200": 2250, "GB200": 2500, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835,
    "H100": 989, "H20": 148, "A100": 312, "A10G": 125, "L40S": 362, "L40": 181, "L4": 121, "RTX PRO 6000": 504,
    "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
"""Part of the GPU's name -> dense bf16 tensor-core TFLOP/s with float32 accumulation, from NVIDIA's data sheets and
architecture papers, at boost clock, without sparsity. The longest part that is in a name counts."""
PER_BFLOAT16 = {"bfloat16": 1.0, "float16": 1.0, "float32": 0.5}
"""Peak of a dtype over that of bf16; float32 at TF32's, which is its upper limit whether TF32 is on or not."""


def peak_of(gpu_name: str, *, dtype: str = "bfloat16") -> float | None:
    """FLOP/s that a GPU can do at most in a dtype; None for an unknown one."""
    share = PER_BFLOAT16.get(dtype)
    known = [part for part in PEAK_TFLOPS if part in gpu_name]
    if not known or share is None:
        return None
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 * share


def peak_flops(record: Record) -> float | None:
    """FLOP/s that the record's GPU can do at most; None for an unknown one."""
    gpu = record.environment.gpu if record.environment else None
    return None if gpu is None else peak_of(gpu.name, dtype=record.case.dtype)


def floor_s(record: Record) -> float | None:
    """Seconds that no denoise of this record can take less than; None where FLOPs or GPU are unknown."""
    peak = peak_flops(record)
    return None if peak is None or record.denoise_flops is None else record.denoise_flops / peak
