"""What this machine can do for a run, and what to change where it cannot: the checks behind `doctor`.

Here: one function per check, each a `Check`. Not here: environment variables and NVML (`environment.py` passes in what
they say), facts that a record stores.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import queue
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

GB = 10**9
OLDEST_PYTHON = (3, 11)
BF16_CAPABILITY = (8, 0)
HUB_TIMEOUT_S = 2.0
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)
"""What importing a package with a missing or mismatched library raises."""
CPU_ONLY = "on a CPU, bcgbench compares outputs and checks graph use with the tape, but measures no speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. `ok` None means that it does not apply or could not be found out."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""
    """What to do about it; "" where nothing is to be done."""

    @property
    def text(self) -> str:
        """Detail and remedy in one line."""
        return f"{self.detail}; {self.remedy}" if self.remedy else self.detail


def examine(
    *,
    results: Path,
    driver: str | None,
    nvml_problem: str,
    hub: str,
    offline_by: str | None,
    memory_bytes: int,
) -> list[Check]:
    """Every check, in the order in which one depends on another.

    `driver` is its version if NVML tells, `nvml_problem` why NVML does not work ("" if it does), `offline_by` the
    environment variable that forbids downloads.
    """
    torch = _import("torch")
    found = [_python(), _package("torch", remedy="install torch 2.11 or newer: pytorch.org has one per CUDA version")]
    gpu = _gpu(torch)
    found += [
        gpu,
        *(_of_gpu(check, name, torch, has_gpu=gpu.ok is True) for name, check in GPU_CHECKS.items()),
        _driver(driver),
        _nvml(nvml_problem, has_gpu=gpu.ok is True),
        _cuda_bindings(),
        _package("diffusers", remedy="pip install 'diffusers>=0.42'"),
        _package("transformers", remedy="pip install 'transformers>=5'"),
        Check(name="host memory", ok=True, detail=f"{memory_bytes / GB:.1f} GB"),
        _hub(hub, offline_by=offline_by),
        _results(results),
    ]
    return found


def _import(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except IMPORT_ERRORS:
        return None


def _python() -> Check:
    needed = ".".join(map(str, OLDEST_PYTHON))
    ok = sys.version_info >= OLDEST_PYTHON
    return Check(name="Python", ok=ok, detail=sys.version.split()[0], remedy="" if ok else f"needs {needed} or newer")


def _package(name: str, *, remedy: str) -> Check:
    """Whether a package can be imported, not only whether it is installed."""
    try:
        importlib.import_module(name)
        return Check(name=name, ok=True, detail=importlib.metadata.version(name))
    except IMPORT_ERRORS as error:
        return Check(name=name, ok=False, detail=f"cannot be imported: {_first_line(error)}", remedy=remedy)


def _gpu(torch: Any | None) -> Check:
    """The CUDA device that torch would use, else why there is none."""
    if torch is None:
        return Check(name="GPU", ok=None, detail="not known without torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason is asked for below instead
        if torch.cuda.is_available():
            return Check(name="GPU", ok=True, detail=torch.cuda.get_device_name())
        try:
            torch.cuda.init()
            reason = "torch finds no device"
        except (RuntimeError, AssertionError) as error:
            reason = _first_line(error)
    remedy = f"for figures, use a machine with an NVIDIA GPU and a CUDA build of torch; {CPU_ONLY}"
    return Check(name="GPU", ok=False, detail=reason, remedy=remedy)


def _of_gpu(check: Callable[[Any], Check], name: str, torch: Any | None, *, has_gpu: bool) -> Check:
    """A check of the GPU, or that there is none to check."""
    if torch is None or not has_gpu:
        return Check(name=name, ok=None, detail="no GPU")
    return check(torch)


def _capability(torch: Any) -> Check:
    """Whether the GPU computes in bfloat16 and this torch has kernels for it."""
    name = "compute capability"
    major, minor = torch.cuda.get_device_capability()
    built = torch.cuda.get_arch_list()
    detail = f"{major}.{minor}, torch is built for {' '.join(built) or 'unknown'}"
    if (major, minor) < BF16_CAPABILITY:
        return Check(
            name=name, ok=False, detail=detail, remedy="bfloat16 needs 8.0 (Ampere) or newer: use --dtype float16"
        )
    if built and not any(_runs_on(arch, major=major, minor=minor) for arch in built):
        return Check(name=name, ok=False, detail=detail, remedy="install a torch build for this GPU")
    return Check(name=name, ok=True, detail=detail)


def _runs_on(arch: str, *, major: int, minor: int) -> bool:
    """Whether code built for `arch` ("sm_90", "sm_90a", "compute_80") runs on a GPU of this capability.

    Binary code runs on the same major version from its minor version on, PTX on every newer GPU.
    """
    kind, _, digits = arch.partition("_")
    number = "".join(c for c in digits if c.isdigit())
    if not number:
        return False
    built = (int(number[:-1] or 0), int(number[-1]))
    return built <= (major, minor) and (kind == "compute" or built[0] == major)


def _gpu_memory(torch: Any) -> Check:
    free, total = torch.cuda.mem_get_info()
    detail = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    crowded = free < total / 2
    remedy = "other processes hold more than half of it: figures will be disturbed, and large models may not fit"
    return Check(name="GPU memory", ok=not crowded, detail=detail, remedy=remedy if crowded else "")


GPU_CHECKS: dict[str, Callable[[Any], Check]] = {"compute capability": _capability, "GPU memory": _gpu_memory}


def _driver(version: str | None) -> Check:
    if version is None:
        return Check(name="NVIDIA driver", ok=None, detail="not known without NVML")
    return Check(name="NVIDIA driver", ok=True, detail=version)


def _nvml(problem: str, *, has_gpu: bool) -> Check:
    if not problem:
        return Check(name="NVML", ok=True, detail="clocks, power and throttle reasons are recorded")
    if not has_gpu:
        return Check(name="NVML", ok=None, detail=f"no GPU ({problem})")
    remedy = "runs work, without clocks and throttle reasons; pip install nvidia-ml-py, and let containers see NVML"
    return Check(name="NVML", ok=False, detail=problem, remedy=remedy)


def _cuda_bindings() -> Check:
    """Segments are captured through the driver API."""
    try:
        importlib.import_module("cuda.bindings.driver")
        return Check(name="cuda-bindings", ok=True, detail=importlib.metadata.version("cuda-bindings"))
    except (*IMPORT_ERRORS, importlib.metadata.PackageNotFoundError) as error:
        detail = f"cannot be imported: {_first_line(error)}"
        return Check(
            name="cuda-bindings", ok=False, detail=detail, remedy="pip install cuda-python: no graph without it"
        )


def _hub(hub: str, *, offline_by: str | None) -> Check:
    name, without = "model hub", "pretrained weights must be in the local cache, or use --source or --weights random"
    if offline_by is not None:
        return Check(name=name, ok=None, detail=f"switched off by {offline_by}", remedy=without)
    problem = unreachable(hub, timeout_s=HUB_TIMEOUT_S)
    if problem:
        return Check(name=name, ok=False, detail=f"{hub}: {problem}", remedy=without)
    return Check(name=name, ok=True, detail=f"{hub} answers")


def unreachable(url: str, *, timeout_s: float) -> str:
    """Why `url` does not answer within `timeout_s`, "" if it does, whatever it answers.

    In a thread that is left behind, because looking up a name has no timeout of its own.
    """
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s):
                answers.put("")
        except urllib.error.HTTPError as refusal:
            refusal.close()
            answers.put("")
        except urllib.error.URLError as error:
            answers.put(str(error.reason))
        except (OSError, ValueError, HTTPException) as error:
            answers.put(_first_line(error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return f"no answer within {timeout_s:g} s"


def _results(folder: Path) -> Check:
    """Whether a run could be stored: tried, because permissions alone do not tell (root, read-only mounts)."""
    nearest = next((p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir()), Path.cwd())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return Check(name="results folder", ok=True, detail=f"{folder} can be written")
    except OSError as error:
        remedy = "give another folder with --results"
        return Check(name="results folder", ok=False, detail=f"{folder}: {_first_line(error)}", remedy=remedy)


def _first_line(error: BaseException) -> str:
    """An error in one line, with its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
