"""machine: settings are read without touching them, whatever mixture of old and new switches is set."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from bcgbench import machine


@pytest.fixture
def tf32():
    """Let a test set TF32 through the new interface, and put it back."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_tf32_of_the_new_interface_is_read(tf32):
    """Setting it makes the old getters raise (torch 2.9 and newer): that must not end a run."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    found = machine.settings()
    assert found["cuda.matmul.fp32_precision"] == "tf32"
    assert all(found.values())


def test_changed_settings_are_seen():
    """A record shows what was in force, not the defaults."""
    before = torch.backends.cudnn.benchmark, torch.backends.cuda.flash_sdp_enabled()
    try:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.enable_flash_sdp(False)
        found = machine.settings()
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.backends.cuda.enable_flash_sdp(before[1])
    assert found["cudnn.benchmark"] == "True"
    assert "flash" not in found["sdpa"].split(",")


def test_a_setting_that_raises_is_said_so():
    """One unreadable switch does not lose the others."""

    def fail():
        raise RuntimeError("mixed interfaces")

    assert machine._read(fail) == "not readable"


def test_the_attention_backend_of_diffusers_is_read_where_it_is_loaded(monkeypatch):
    """Not imported for it: a record of another pipeline has no such setting."""
    name = "diffusers.models.attention_dispatch"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert "diffusers.attention" not in machine.settings()
    registry = SimpleNamespace(get_active_backend=lambda: (SimpleNamespace(value="flash"), None))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(_AttentionBackendRegistry=registry))
    assert machine.settings()["diffusers.attention"] == "flash"


def test_diffusers_has_the_registry_that_is_read():
    """The name is private: this fails when a new diffusers moves it."""
    pytest.importorskip("diffusers.models.attention_dispatch")
    assert machine.settings()["diffusers.attention"] == "native"


def test_packages_that_are_not_installed_are_left_out(monkeypatch):
    """No entry rather than an empty one."""
    monkeypatch.setattr(machine, "PACKAGES", ("numpy", "no-such-package"))
    assert set(machine.packages()) == {"bcgbench", "numpy"}


def test_cpus_are_those_of_this_process(monkeypatch):
    """A container restricts them."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 5, 9}, raising=False)
    assert machine.cpu_count() == 3


def test_a_container_limits_memory(monkeypatch, tmp_path):
    """The lower of host memory and control group; "max" is no limit."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CGROUP_LIMIT", limit)
    host = machine.memory_bytes()
    limit.write_text("max\n")
    assert machine.memory_bytes() == host
    limit.write_text("1073741824\n")
    assert machine.memory_bytes() == 1 << 30


def test_the_kernel_suffix_is_left_out(monkeypatch):
    """It names a provider's build."""
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine.platform, "release", lambda: "6.8.0-1021-provider")
    assert machine.system() == "Linux 6.8.0"
