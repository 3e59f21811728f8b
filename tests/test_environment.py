"""environment: what is recorded of a machine, what is never published, NVML by UUID, git of the package alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bcgbench import environment
from bcgbench.store import from_json, to_json
from bcgbench.types import Environment, GpuState


class NvmlError(Exception):
    """As pynvml's."""


def fake_nvml(**changes):
    """NVML with one GPU; `changes` replace answers, an exception is raised."""
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetDriverVersion": "580.65",
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetPowerUsage": 520_500,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTemperature": 54,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)],
        **changes,
    }
    calls = []

    def function(name, answer):
        def call(*arguments):
            calls.append((name, *arguments))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    functions = {name: function(name, answer) for name, answer in answers.items()}
    constants = {"NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0, "NVMLError": NvmlError}
    return SimpleNamespace(**functions, **constants, calls=calls)


@pytest.fixture
def nvml(monkeypatch):
    """Install a fake NVML and a CUDA device with a UUID."""

    def install(**changes):
        module = fake_nvml(**changes)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.setattr(environment, "_uuid", lambda device: "GPU-1234")
        return module

    return install


def test_a_cpu_machine_is_described():
    """All that needs no GPU is there, the rest is None, and the record survives storage."""
    found = environment.collect("cpu")
    assert (found.gpu, found.host_launch_s) == (None, None)
    assert found.cpu
    assert found.cpu_count >= 1
    assert found.memory_bytes > 1 << 28
    assert {"bcgbench", "torch", "diffusers", "transformers", "numpy"} <= set(found.packages)
    assert {"float32_matmul_precision", "deterministic", "sdpa"} <= set(found.settings)
    assert from_json(Environment, to_json(found)) == found


def test_only_listed_variables_are_recorded(monkeypatch):
    """A token in the environment is never published."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = environment.collect("cpu")
    assert found.env_vars["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "secret" not in repr(found)


def test_uuids_are_not_published(monkeypatch):
    """CUDA_VISIBLE_DEVICES may name GPUs by UUID."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2c1d3e-1111-2222-3333-444455556666,MIG-0a1b-22")
    assert environment.collect("cpu").env_vars["CUDA_VISIBLE_DEVICES"] == "GPU-(uuid),MIG-(uuid)"


def test_a_state_is_read_in_si_units(nvml):
    """MHz and milliwatts become hertz and watts; the GPU is asked for by UUID, not by index."""
    module = nvml()
    with environment.GpuMonitor("cuda:3") as monitor:
        state = monitor.state()
    assert state == GpuState(
        sm_clock_hz=1_980_000_000,
        memory_clock_hz=1_980_000_000,
        power_w=520.5,
        temperature_c=54.0,
        throttle_bits=0x4,
    )
    assert ("nvmlDeviceGetHandleByUUID", "GPU-1234") in module.calls
    assert ("nvmlDeviceGetClockInfo", "handle", 2) in module.calls
    assert module.calls[-1] == ("nvmlShutdown",)
    assert monitor.state() is None, "closed"


def test_figures_of_a_gpu(nvml):
    """Driver, highest clock, power limit, and the processes of others."""
    nvml()
    monitor = environment.GpuMonitor()
    assert (monitor.driver, monitor.sm_clock_max_hz, monitor.power_limit_w) == ("580.65", 1_980_000_000, 700.0)
    assert monitor.other_processes == 1


@pytest.mark.parametrize("pids", [[], [1], [1, 2]])
def test_hidden_processes_are_unknown(nvml, pids):
    """A container that does not show this very process hides others too: None, not 0."""
    nvml(nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=pid) for pid in pids])
    assert environment.GpuMonitor().other_processes is None


@pytest.mark.parametrize("query", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo", "nvmlDeviceGetHandleByUUID"])
def test_a_partial_state_is_none(nvml, query):
    """A GPU that does not tell one of the figures (MIG) gives no state; the process goes on."""
    nvml(**{query: NvmlError("Not Supported")})
    assert environment.gpu_state() is None


def test_an_unsupported_figure_is_none(nvml):
    """Others remain."""
    nvml(nvmlDeviceGetEnforcedPowerLimit=NvmlError("Not Supported"))
    monitor = environment.GpuMonitor()
    assert monitor.power_limit_w is None
    assert monitor.state() is not None


def test_without_nvml_there_is_no_state(monkeypatch):
    """Neither a missing package nor a missing library is an error."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert environment.gpu_state() is None
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=NvmlError("NVML Shared Library Not Found")))
    assert environment.gpu_state() is None


def git(folder, *arguments):
    """Run git with an identity."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """A repository with the package in it, committed."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "types.py").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "begin")
    return tmp_path


def test_commit_and_changes_of_the_package(repository):
    """Dirty means changes in the package, not new results beside it."""
    commit, dirty = environment._git(repository / "package")
    assert len(commit) == 40
    assert dirty is False
    (repository / "results").mkdir()
    (repository / "results" / "run.json").write_text("{}")
    assert environment._git(repository / "package") == (commit, False)
    (repository / "package" / "types.py").write_text("x = 1")
    assert environment._git(repository / "package") == (commit, True)


def test_an_installed_package_has_no_commit(repository):
    """A virtual environment inside another repository must not report that one's commit."""
    site = repository / ".venv" / "site-packages" / "bcgbench"
    site.mkdir(parents=True)
    (site / "types.py").write_text("")
    assert environment._git(site) == (None, None)


def test_without_git_there_is_no_commit(monkeypatch, tmp_path):
    """No git, no repository: None, not an error."""
    assert environment._git(tmp_path) == (None, None)
    monkeypatch.setenv("PATH", "")
    assert environment._git(Path(environment.__file__).parent) == (None, None)


def test_doctor_passes_on_what_only_the_environment_knows(monkeypatch, nvml, tmp_path):
    """Driver, NVML's fault, hub and offline switch."""
    seen = []
    monkeypatch.setattr(environment, "examine", lambda **facts: seen.append(facts) or [])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example.org")
    nvml()
    assert environment.doctor(results=tmp_path) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_ENDPOINT")
    nvml(nvmlInit=NvmlError("Driver Not Loaded"))
    environment.doctor()
    first, second = seen
    assert (first["driver"], first["nvml_problem"], first["results"]) == ("580.65", "", tmp_path)
    assert (first["offline_by"], first["hub"]) == ("HF_HUB_OFFLINE", "https://mirror.example.org")
    assert (second["driver"], second["nvml_problem"]) == (None, "Driver Not Loaded")
    assert (second["offline_by"], second["hub"]) == (None, "https://huggingface.co")


def test_importing_the_module_does_not_import_torch():
    """`doctor` answers without loading torch first."""
    code = "import sys, bcgbench.environment; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
