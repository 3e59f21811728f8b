"""measure, profile, machine, environment and fidelity against a real device: clocks agree, kernels are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bcgbench import environment, machine
from bcgbench.fidelity import compare, digest
from bcgbench.measure import CudaClock, DenoiseTap, peak, peak_reset, request
from bcgbench.models.media import Media
from bcgbench.profile import profile_request

pytestmark = pytest.mark.gpu

STEPS, ADDS = 4, 50


class Bar:
    """A bar that draws nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def update(self, n=1):
        """Nothing to draw."""


class Scheduler:
    """Keeps the sample: the work is the model's."""

    def step(self, model_output, timestep, sample, return_dict=True):
        return (model_output,)


class Pipeline:
    """A denoise loop of `STEPS` times `work(latents)`, with GPU work before and after it that is not the loop's."""

    def __init__(self, work):
        self.scheduler, self.work = Scheduler(), work
        self.latents = torch.zeros(1 << 20, device="cuda")

    def progress_bar(self, iterable=None, total=None):
        return Bar()

    def __call__(self):
        self.latents.zero_().add_(1)
        latents = self.latents
        with self.progress_bar(total=STEPS) as bar:
            for i in range(STEPS):
                latents = self.scheduler.step(self.work(latents), i, latents, return_dict=False)[0]
                bar.update()
        return (latents * 2).sum()


class Session:
    """As much of a loaded model as `request` uses."""

    def __init__(self, work):
        self.pipe = Pipeline(work)

    def produce(self, prompt, *, steps=None):
        self.pipe()
        return Media(images=np.zeros((1, 4, 4, 3), dtype=np.uint8))


def add_many(latents):
    """`ADDS` kernels, in place."""
    for _ in range(ADDS):
        latents.add_(1)
    return latents


@pytest.fixture(scope="module")
def replay():
    """A function that replays a graph of `ADDS` kernels over its own buffer, and returns that."""
    buffer = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        add_many(buffer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_many(buffer)

    def run(latents):
        graph.replay()
        return buffer

    return run


def test_event_and_host_time_agree():
    """Two clocks of one span of 0.2 s: within 2 % or 2 ms, which is the limit of a valid record."""

    def sleep(latents):
        torch.cuda._sleep(100_000_000)
        return latents

    session = Session(sleep)
    request(session, 0, clock=CudaClock())
    measured = request(session, 0, clock=CudaClock())
    assert measured.denoise_event_s == pytest.approx(measured.denoise_host_s, rel=0.02, abs=0.002)
    assert len(measured.step_s) == STEPS
    assert sum(measured.step_s) == pytest.approx(measured.denoise_event_s, rel=0.01)
    stages = measured.before_s + measured.denoise_host_s + measured.after_s
    assert stages == pytest.approx(measured.end_to_end_s, rel=0.02, abs=0.002)


def test_the_host_runs_ahead_inside_the_loop():
    """With kernels of 50 ms or more, the loop's last update is long past when the first step ends."""
    reached = []

    def sleep(latents):
        torch.cuda._sleep(100_000_000)
        return latents

    pipe, clock = Pipeline(sleep), CudaClock()
    with DenoiseTap(pipe, clock, on_step=lambda i: reached.append(clock.now_s())) as tap:
        pipe()
    assert reached[-1] - tap.start_s < tap.denoise_host_s / STEPS


def test_an_eager_loop_is_counted():
    """One launch and one kernel per add, the work around the loop left out, nothing recorded twice."""
    session = Session(add_many)
    request(session, 0, clock=CudaClock())
    measured = request(session, 0, clock=CudaClock())
    found = profile_request(
        lambda: request(session, 0, clock=CudaClock()) and None, steps=STEPS, graph_kernels_per_step=0
    )
    assert found.note == ""
    assert found.launches == {"kernel": ADDS, "graph": 0, "memcpy": 0, "memset": 0}
    assert found.kernels == ADDS
    assert 0 < found.busy_s < measured.denoise_event_s / STEPS * 1.05


def test_a_replayed_graph_is_counted_or_refused(replay):
    """One graph launch a step; the graph's kernels are all there, or there is a note and no busy time."""
    session = Session(replay)
    request(session, 0, clock=CudaClock())
    found = profile_request(
        lambda: request(session, 0, clock=CudaClock()) and None, steps=STEPS, graph_kernels_per_step=ADDS
    )
    assert found.launches["graph"] == 1
    assert found.launches["kernel"] == 0
    if found.busy_s is None:
        assert "expected GPU activities" in found.note
        pytest.xfail(f"this driver under-records graph replays: {found.note}")
    assert found.kernels == ADDS
    assert found.busy_s > 0


def test_a_graph_that_holds_more_than_was_traced_has_no_busy_time(replay):
    """The check can fail: a graph said to be twice as large."""
    session = Session(replay)
    found = profile_request(
        lambda: request(session, 0, clock=CudaClock()) and None, steps=STEPS, graph_kernels_per_step=2 * ADDS
    )
    assert found.busy_s is None


def test_peaks_are_those_since_the_reset():
    """A tensor that came and went counts, one from before the reset does not."""
    big = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del big
    peak_reset()
    before, _ = peak()
    torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
    allocated, reserved = peak()
    assert allocated - before == 1 << 24
    assert reserved >= allocated


def test_launches_cost_microseconds():
    """Between half a microsecond and a millisecond; twice the same within a factor of two."""
    first, second = machine.host_launch_s(), machine.host_launch_s()
    assert 5e-7 < first < 1e-3
    assert 0.5 < first / second < 2


def test_the_gpu_is_described():
    """Name, memory and driver; NVML's figures where the machine has NVML."""
    found = environment.collect("cuda")
    assert found.gpu.name == torch.cuda.get_device_name()
    assert found.gpu.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert len(found.gpu.uuid_sha256) == 64
    assert found.cuda == torch.version.cuda
    assert found.host_launch_s > 0
    state = environment.gpu_state()
    if state is None:
        pytest.skip(f"NVML gives no state here: {environment._nvml()[1] or 'a figure is missing'}")
    assert found.gpu.driver != "unknown"
    assert 1e8 < state.sm_clock_hz <= found.gpu.sm_clock_max_hz * 1.01
    assert 0 < state.power_w < 5_000
    assert 0 < state.temperature_c < 120


def test_a_state_is_cheap_enough_for_every_image():
    """20 ms beside an image of some hundred."""
    clock = CudaClock()
    with environment.GpuMonitor() as monitor:
        monitor.state()
        began = clock.now_s()
        for _ in range(10):
            monitor.state()
        assert (clock.now_s() - began) / 10 < 0.02


def test_doctor_finds_the_gpu(tmp_path):
    """The checks that need a GPU ran."""
    found = {check.name: check for check in environment.doctor(results=tmp_path)}
    assert found["GPU"].ok is True
    assert found["compute capability"].ok is True
    assert found["GPU memory"].ok is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_are_compared_wherever_they_lie(dtype):
    """Device and host copies have one digest; a single changed value is found."""
    a = torch.randn(2, 64, 128, device="cuda").to(dtype)
    b = a.clone()
    b[1, 3, 5] += 1
    assert digest(a) == digest(a.cpu())
    assert compare(a, a.cpu(), name="x").exact
    found = compare(a, b, name="x")
    assert (found.differing, found.bounding_box) == (1, ((1, 1), (3, 3), (5, 5)))
