"""Facts of the host and of the software in this process: CPU, memory, packages, resolved settings, launch cost.

Here: what is read from the machine and from torch. Not here: environment variables, NVML and git, which only
`environment.py` reads. torch is imported only where a function needs it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import bcgbench
from bcgbench.stats import median

PACKAGES = (
    "torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "cuda-python", "cuda-bindings",
    "nvidia-ml-py", "triton", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "flash-attn", "flash_attn_3", "kernels", "sageattention", "torchao", "xformers",
)  # fmt: skip
"""Recorded where installed: they change the kernels that run."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Memory limit of the container, version 2 control groups."""
LAUNCHES, LAUNCHES_PER_BATCH = 4_000, 500
"""The launch queue holds about 1,000: past that a launch waits for the GPU, and its time is no host cost."""


def host_launch_s(device: str = "cuda") -> float:
    """Median host seconds to launch one tiny kernel through torch, the queue never full."""
    import torch

    x = torch.zeros(1, device=device)
    times = []
    for number in range(LAUNCHES + LAUNCHES_PER_BATCH):  # the first batch warms up
        if number % LAUNCHES_PER_BATCH == 0:
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        x.add_(1)
        times.append(time.perf_counter() - start_s)
    torch.cuda.synchronize(device)
    return median(times[LAUNCHES_PER_BATCH:])


def system() -> str:
    """Operating system and its release, without the suffix by which a provider names its kernels."""
    return f"{platform.system()} {platform.release().partition('-')[0]}"


def cpu() -> str:
    """Model name; Linux has it in /proc/cpuinfo, except on Arm."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def cpu_count() -> int:
    """CPUs that this process may use, which a container or `taskset` can restrict."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Host memory, or the container's limit where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = CGROUP_LIMIT.read_text(encoding="utf-8").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def packages() -> dict[str, str]:
    found = {"bcgbench": bcgbench.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def settings() -> dict[str, str]:
    """Resolved torch settings that change numerics or speed.

    TF32 has an old and a new interface since torch 2.9; reading one after the other was set raises, so both are read
    and what cannot be is said so.
    """
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    readers: dict[str, Callable[[], object]] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cuda.matmul.fp32_precision": lambda: cuda.matmul.fp32_precision,
        "cudnn.conv.fp32_precision": lambda: cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: (
            cuda.matmul.allow_fp16_reduced_precision_reduction
        ),
        "cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: (
            cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "cudnn.version": cudnn.version,
        "cudnn.enabled": lambda: cudnn.enabled,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "sdpa": _sdpa_backends,
        "threads": torch.get_num_threads,
    }
    if dispatch := sys.modules.get("diffusers.models.attention_dispatch"):
        readers["diffusers.attention"] = lambda: dispatch._AttentionBackendRegistry.get_active_backend()[0].value
    return {name: _read(reader) for name, reader in readers.items()}


def _read(reader: Callable[[], object]) -> str:
    try:
        return str(reader())
    except (AttributeError, RuntimeError):
        return "not readable"


def _sdpa_backends() -> str:
    from torch.backends import cuda

    enabled: dict[str, Callable[[], bool]] = {
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return ",".join(name for name, is_enabled in enabled.items() if is_enabled())
