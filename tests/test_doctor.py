"""doctor: each fault of a machine is found, named, and comes with a remedy."""

from __future__ import annotations

import http.server
import threading
import time
from types import SimpleNamespace

import pytest

from bcgbench import doctor

GIB = 1 << 30


def run(tmp_path, **changes):
    """All checks by name, for an offline machine unless changed."""
    facts = {
        "results": tmp_path, "driver": None, "nvml_problem": "NVML Shared Library Not Found",
        "hub": "https://hub.example.org", "offline_by": "HF_HUB_OFFLINE", "memory_bytes": 64 * GIB, **changes,
    }  # fmt: skip
    return {check.name: check for check in doctor.examine(**facts)}


def fake_torch(*, capability=(9, 0), archs=("sm_80", "sm_90"), free=100 * GIB, available=True, error=None):
    """As much of torch.cuda as the checks ask."""

    def init():
        if error:
            raise error

    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: available,
            init=init,
            get_device_name=lambda: "NVIDIA H200",
            get_device_capability=lambda: capability,
            get_arch_list=lambda: list(archs),
            mem_get_info=lambda: (free, 141 * GIB),
        )
    )


@pytest.fixture
def torch_is(monkeypatch):
    """Run the checks with another torch, or none."""

    def install(torch):
        monkeypatch.setattr(doctor, "_import", lambda name: torch)

    return install


def test_a_machine_with_a_gpu_passes(tmp_path, torch_is):
    """Every check of the GPU is true, and nothing is asked of the reader."""
    torch_is(fake_torch())
    found = run(tmp_path, driver="580.65", nvml_problem="")
    for name in ("GPU", "compute capability", "GPU memory", "NVIDIA driver", "NVML", "results folder"):
        assert (found[name].ok, found[name].remedy) == (True, "")
    assert found["GPU"].detail == "NVIDIA H200"
    assert found["host memory"].detail == "68.7 GB"


def test_without_a_gpu_the_reason_is_given(tmp_path, torch_is):
    """CPU build and missing driver need different remedies, so torch's own reason is shown."""
    torch_is(fake_torch(available=False, error=RuntimeError("Found no NVIDIA driver on your system.\nPlease check")))
    found = run(tmp_path)
    assert found["GPU"].ok is False
    assert found["GPU"].detail == "Found no NVIDIA driver on your system."
    assert "CUDA build" in found["GPU"].text
    assert [found[name].ok for name in ("compute capability", "GPU memory", "NVML")] == [None, None, None]


def test_without_torch_the_rest_is_still_checked(tmp_path, torch_is):
    """A broken torch is what a doctor is called for."""
    torch_is(None)
    found = run(tmp_path)
    assert found["GPU"].ok is None
    assert found["results folder"].ok is True


def test_a_package_that_cannot_be_imported_is_found(monkeypatch, tmp_path):
    """Installed is not enough: a mismatched library fails at import."""
    original = doctor.importlib.import_module

    def fail(name):
        if name == "diffusers":
            raise OSError("libcudart.so.12: cannot open shared object file\nmore")
        return original(name)

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    found = run(tmp_path)["diffusers"]
    assert found.ok is False
    assert found.detail == "cannot be imported: libcudart.so.12: cannot open shared object file"
    assert found.remedy.startswith("pip install")


@pytest.mark.parametrize(
    ("capability", "archs", "remedy"),
    [
        ((9, 0), ("sm_80", "sm_90"), ""),
        ((8, 9), ("sm_80", "sm_86"), ""),
        ((12, 0), ("sm_90", "compute_90"), ""),
        ((9, 0), ("sm_90a",), ""),
        ((10, 0), ("sm_80", "sm_90"), "torch build"),
        ((8, 0), ("sm_86",), "torch build"),
        ((7, 5), ("sm_75",), "bfloat16"),
    ],
)
def test_compute_capability(tmp_path, torch_is, capability, archs, remedy):
    """bfloat16 from 8.0; binary code within a major version, PTX on newer ones."""
    torch_is(fake_torch(capability=capability, archs=archs))
    found = run(tmp_path)["compute capability"]
    assert found.ok is (remedy == "")
    assert remedy in found.remedy


def test_a_crowded_gpu_is_named(tmp_path, torch_is):
    """Neighbours disturb figures."""
    torch_is(fake_torch(free=20 * GIB))
    found = run(tmp_path)["GPU memory"]
    assert (found.ok, found.detail) == (False, "21.5 of 151.4 GB free")


def test_offline_is_a_choice_not_a_fault(tmp_path):
    """Nothing is asked of the network, and the switch is named."""
    found = run(tmp_path)["model hub"]
    assert found.ok is None
    assert "HF_HUB_OFFLINE" in found.detail


@pytest.fixture
def server():
    """A local server that answers 404 at once, or after a while at /slow."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            if self.path == "/slow":
                time.sleep(1)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *arguments):
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_address[1]}"
        found.shutdown()


@pytest.fixture
def no_proxy(monkeypatch):
    """Local requests go to the local server."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_any_answer_means_reachable(tmp_path, server, no_proxy):
    """Also a refusal: the question is whether there is a way."""
    assert run(tmp_path, hub=server, offline_by=None)["model hub"].ok is True


def test_a_slow_network_is_given_up(server, no_proxy):
    """Within the limit, whatever hangs."""
    began = time.monotonic()
    assert doctor.unreachable(f"{server}/slow", timeout_s=0.1)
    assert time.monotonic() - began < 0.9


def test_an_unreachable_hub_says_what_still_works(tmp_path, no_proxy):
    """Port 9 answers to nobody."""
    found = run(tmp_path, hub="http://127.0.0.1:9", offline_by=None)["model hub"]
    assert found.ok is False
    assert "--weights random" in found.remedy
    assert "urlopen" not in found.detail


def test_a_malformed_hub_is_reported():
    """A bad HF_ENDPOINT is a finding, not a crash."""
    assert doctor.unreachable("hub", timeout_s=1.0)


def test_a_results_folder_need_not_exist(tmp_path):
    """Its nearest parent must be writable; nothing is left there."""
    assert run(tmp_path / "a" / "b")["results folder"].ok is True
    assert list(tmp_path.iterdir()) == []


def test_a_results_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """Tried, because root may write anywhere but on a read-only mount."""

    def refuse(**kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    found = run(tmp_path)["results folder"]
    assert found.ok is False
    assert "--results" in found.remedy


def test_every_fault_has_a_remedy(tmp_path, torch_is):
    """A finding without advice helps nobody."""
    torch_is(fake_torch(available=False, error=AssertionError("Torch not compiled with CUDA enabled")))
    for check in run(tmp_path).values():
        assert check.detail
        assert check.ok is not False or check.remedy
