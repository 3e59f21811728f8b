"""What this machine and process are: hardware, packages, resolved settings. The one reader of os.environ, NVML and git.

Here: facts as values, None for what cannot be known. Not here: whether two environments compare (`comparable.py`), what
this machine can do (`doctor.py`). Nothing is set, and torch is imported only where a function needs it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bcgbench import machine
from bcgbench.doctor import Check, examine
from bcgbench.types import Environment, Gpu, GpuState

ENV_VARS = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "DIFFUSERS_ATTN_BACKEND", "DIFFUSERS_ATTN_CHECKS", "MKL_NUM_THREADS",
    "NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_TUNABLEOP_ENABLED", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE",
)  # fmt: skip
"""Recorded where set. An allow-list, so that no token or host name is ever published."""
GIT_TIMEOUT_S = 5.0
HUB = "https://huggingface.co"


def collect(device: str) -> Environment:
    """Describe the machine, software and settings of this process; `device` is "cpu", "cuda" or "cuda:1".

    On CUDA, takes some 50 ms for launch timing; call it where nothing is being measured.
    """
    import torch

    commit, dirty = _git(Path(__file__).parent)
    is_cuda = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return Environment(
        gpu=_gpu(device) if is_cuda else None,
        cpu=machine.cpu(),
        cpu_count=machine.cpu_count(),
        memory_bytes=machine.memory_bytes(),
        os=machine.system(),
        python=platform.python_version(),
        packages=machine.packages(),
        cuda=torch.version.cuda,
        git_commit=commit,
        git_dirty=dirty,
        host_launch_s=machine.host_launch_s(device) if is_cuda else None,
        settings=machine.settings(),
        env_vars={name: _without_uuids(os.environ[name]) for name in ENV_VARS if name in os.environ},
    )


class GpuMonitor:
    """NVML's view of one CUDA device, held open so that a state is five queries: cheap enough for every image.

    The device is found by UUID: NVML numbers all GPUs in bus order, CUDA only those of CUDA_VISIBLE_DEVICES in its own.
    Without NVML, or for a part of a GPU (MIG), states and figures are None.
    """

    def __init__(self, device: str = "cuda") -> None:
        self._nvml = _nvml()[0]
        self._handle = None
        if self._nvml is not None:
            uuid = _uuid(device)
            self._handle = self._ask("nvmlDeviceGetHandleByUUID", uuid) if uuid else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let NVML go; states are None from now on."""
        if self._nvml is not None:
            self._ask("nvmlShutdown")
        self._nvml = self._handle = None

    def state(self) -> GpuState | None:
        """Clocks, power, temperature and throttle reasons now; None where one of them is not told."""
        nvml = self._nvml
        if nvml is None or self._handle is None:
            return None
        values = (
            self._of_gpu("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            self._of_gpu("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            self._of_gpu("nvmlDeviceGetPowerUsage"),
            self._of_gpu("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            self._of_gpu("nvmlDeviceGetCurrentClocksThrottleReasons"),
        )
        if None in values:
            return None
        sm_mhz, memory_mhz, power_mw, celsius, bits = map(int, values)
        return GpuState(
            sm_clock_hz=sm_mhz * 1_000_000,
            memory_clock_hz=memory_mhz * 1_000_000,
            power_w=power_mw / 1e3,
            temperature_c=float(celsius),
            throttle_bits=bits,
        )

    @property
    def driver(self) -> str | None:
        """Version of the NVIDIA driver."""
        found = self._ask("nvmlSystemGetDriverVersion")
        return None if found is None else str(found)

    @property
    def sm_clock_max_hz(self) -> int | None:
        """Highest SM clock that the GPU can be set to."""
        mhz = self._of_gpu("nvmlDeviceGetMaxClockInfo", 1)  # NVML_CLOCK_SM
        return None if mhz is None else int(mhz) * 1_000_000

    @property
    def power_limit_w(self) -> float | None:
        """The limit in force."""
        milliwatts = self._of_gpu("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else float(milliwatts) / 1e3

    @property
    def other_processes(self) -> int | None:
        """Compute processes besides this one, which must have used the GPU; None where a container hides them."""
        found = self._of_gpu("nvmlDeviceGetComputeRunningProcesses")
        pids = [process.pid for process in found or ()]
        return len(pids) - 1 if os.getpid() in pids else None

    def _of_gpu(self, query: str, *arguments: Any) -> Any:
        return None if self._handle is None else self._ask(query, self._handle, *arguments)

    def _ask(self, query: str, *arguments: Any) -> Any:
        """NVML's answer, None where this driver or GPU has none."""
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, query)(*arguments)
        except self._nvml.NVMLError:
            return None


def gpu_state(device: str = "cuda") -> GpuState | None:
    """One state of a GPU, opening NVML for it; hold a `GpuMonitor` to ask more than once."""
    with GpuMonitor(device) as monitor:
        return monitor.state()


def doctor(*, results: Path = Path("results")) -> list[Check]:
    """What this machine can and cannot do, and what to do about it. Takes seconds: it imports what a run imports."""
    nvml, problem = _nvml()
    driver = None
    if nvml is not None:
        driver = str(nvml.nvmlSystemGetDriverVersion())
        nvml.nvmlShutdown()
    offline = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(name)), None)
    return examine(
        results=results,
        driver=driver,
        nvml_problem=problem,
        hub=os.environ.get("HF_ENDPOINT") or HUB,
        offline_by=offline,
        memory_bytes=machine.memory_bytes(),
    )


def _is_on(name: str) -> bool:
    """A switch as huggingface_hub reads it."""
    return os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}


def _nvml() -> tuple[Any | None, str]:
    """(NVML's module, initialised; "") or (None, why not)."""
    try:
        import pynvml
    except ImportError as error:
        return None, f"nvidia-ml-py cannot be imported: {error}"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, str(error)
    return pynvml, ""


def _uuid(device: str) -> str | None:
    """UUID of a CUDA device as NVML writes it; None without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"


def _without_uuids(value: str) -> str:
    """CUDA_VISIBLE_DEVICES may name GPUs by UUID, which is never published."""
    return re.sub(r"\b(GPU|MIG)-[0-9A-Fa-f-]+", r"\1-(uuid)", value)


def _gpu(device: str) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(torch.device(device))
    with GpuMonitor(device) as monitor:
        return Gpu(
            name=properties.name,
            uuid_sha256=hashlib.sha256((_uuid(device) or "").encode()).hexdigest(),
            memory_bytes=properties.total_memory,
            driver=monitor.driver or "unknown",
            sm_clock_max_hz=monitor.sm_clock_max_hz,
            power_limit_w=monitor.power_limit_w,
            other_processes=monitor.other_processes,
        )


def _git(folder: Path) -> tuple[str | None, bool | None]:
    """(commit, has uncommitted changes) of the package's own repository; (None, None) for an installed package.

    `ls-files` first: a virtual environment inside another project's repository would report that one's commit.
    """

    def ask(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if ask("ls-files", "--error-unmatch", "types.py") is None:
        return None, None
    changes = ask("status", "--porcelain", "--", ".")
    return ask("rev-parse", "HEAD"), None if changes is None else bool(changes)
