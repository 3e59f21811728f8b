"""profile: counting launches, kernels and busy time in a trace, and refusing a trace that misses kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcgbench.errors import BcgbenchError
from bcgbench.profile import TraceEvent, profile_request, read_events, summarise, union_ns
from bcgbench.tap import DENOISE_SPAN

LOOP = TraceEvent(DENOISE_SPAN, False, 1_000, 100_000, "user_annotation")


def host(name, start=2_000, kind="cuda_runtime"):
    """A CUDA API call."""
    return TraceEvent(name, False, start, 100, kind)


def gpu(start, duration, *, name="gemm", kind="kernel"):
    """Work on the GPU."""
    return TraceEvent(name, True, start, duration, kind)


def eager(n, *, traced=None):
    """`n` launches and the kernels that a trace has of them, 1 us each, apart."""
    kernels = [gpu(2_000 + 2_000 * i, 1_000) for i in range(n if traced is None else traced)]
    return [LOOP, *[host("cudaLaunchKernel")] * n, *kernels]


def test_counts_are_per_step():
    """Ten launches over two steps are five a step; ten kernels of 1 us are 5 us busy a step."""
    found = summarise(eager(10), steps=2, graph_kernels_per_step=0)
    assert found.launches == {"kernel": 5, "graph": 0, "memcpy": 0, "memset": 0}
    assert found.kernels == 5
    assert found.busy_s == pytest.approx(5e-6)
    assert found.note == ""


def test_overlapping_kernels_are_busy_once():
    """Two streams at once do not make a GPU 200 % busy."""
    events = [LOOP, *[host("cudaLaunchKernel")] * 3, gpu(2_000, 4_000), gpu(3_000, 1_000), gpu(5_000, 3_000)]
    assert summarise(events, steps=1, graph_kernels_per_step=0).busy_s == pytest.approx(6e-6)


def test_work_outside_the_loop_is_not_counted():
    """Text encoder before, VAE after."""
    outside = [host("cudaLaunchKernel", start=10), gpu(20, 900), host("cudaLaunchKernel", 101_500), gpu(102_000, 9_000)]
    inside = eager(4)
    assert summarise([*outside, *inside], steps=1, graph_kernels_per_step=0) == summarise(
        inside, steps=1, graph_kernels_per_step=0
    )


def test_a_kernel_that_outlasts_the_loop_is_clipped():
    """GPU and host clocks agree to some microseconds only."""
    events = [LOOP, host("cudaLaunchKernel"), gpu(100_000, 5_000)]
    assert summarise(events, steps=1, graph_kernels_per_step=0).busy_s == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaLaunchKernel", "kernel"),
        ("cudaLaunchKernelExC", "kernel"),
        ("cudaLaunchKernel_v7000", "kernel"),
        ("cudaLaunchCooperativeKernel", "kernel"),
        ("cuLaunchKernel", "kernel"),
        ("cuLaunchKernelEx", "kernel"),
        ("cudaGraphLaunch", "graph"),
        ("cudaGraphLaunch_v10000", "graph"),
        ("cuGraphLaunch", "graph"),
        ("cudaMemcpyAsync", "memcpy"),
        ("cuMemcpyDtoDAsync_v2", "memcpy"),
        ("cudaMemsetAsync", "memset"),
        ("cudaLaunchHostFunc", None),
        ("cudaStreamSynchronize", None),
        ("cudaGraphInstantiate", None),
        ("aten::copy_", None),
    ],
)
def test_api_calls_are_sorted_by_what_they_launch(name, kind):
    """Runtime and driver API, with and without version suffix; what runs on the host is no launch."""
    found = summarise([LOOP, host(name)], steps=1, graph_kernels_per_step=0).launches
    assert {k for k, count in found.items() if count} == ({kind} if kind else set())


def test_copies_and_fills_are_neither_kernels_nor_busy():
    """A GPU that copies is not computing; they do count as traced activities."""
    copy = gpu(30_000, 9_000, name="Memcpy HtoD (Pageable -> Device)", kind="gpu_memcpy")
    fill = gpu(50_000, 9_000, name="Memset (Device)", kind="gpu_memset")
    found = summarise(
        [*eager(2), host("cudaMemcpyAsync"), copy, host("cudaMemsetAsync"), fill], steps=1, graph_kernels_per_step=0
    )
    assert (found.kernels, found.launches["memcpy"], found.launches["memset"]) == (2, 1, 1)
    assert found.busy_s == pytest.approx(2e-6)


def test_without_kinds_names_decide():
    """A torch that does not tell the activity type."""
    events = [e._replace(kind="") for e in (*eager(2), gpu(60_000, 5_000, name="Memcpy DtoD (Device -> Device)"))]
    assert summarise(events, steps=1, graph_kernels_per_step=0).kernels == 2


def test_synchronisation_on_the_gpu_is_no_kernel():
    """CUPTI reports waits as GPU events too."""
    events = [*eager(2), gpu(3_000, 90_000, name="Stream Wait Event", kind="cuda_sync")]
    found = summarise(events, steps=1, graph_kernels_per_step=0)
    assert (found.kernels, found.busy_s) == (2, pytest.approx(2e-6))


def graphs(*, traced):
    """Two launches of a graph of 50 nodes and `traced` kernels, and one eager kernel between them."""
    kernels = [gpu(2_000 + 500 * i, 100) for i in range(traced + 1)]
    return [LOOP, *[host("cudaGraphLaunch")] * 2, host("cudaLaunchKernel"), *kernels]


@pytest.mark.parametrize(("traced", "is_known"), [(100, True), (99, True), (98, False), (3, False), (0, False)])
def test_an_under_recorded_replay_has_no_busy_time(traced, is_known):
    """Below 99 % of the graphs' nodes a busy GPU would look idle, so there is a note and no figure."""
    found = summarise(graphs(traced=traced), steps=2, graph_kernels_per_step=50)
    assert (found.busy_s is not None) == is_known
    assert ("101 expected" in found.note) != is_known
    assert found.launches == {"kernel": 0.5, "graph": 1, "memcpy": 0, "memset": 0}


def test_graphs_of_unknown_size_have_no_busy_time():
    """Compiled graphs do not tell their nodes; what is missing could not be noticed."""
    found = summarise(graphs(traced=100), steps=2, graph_kernels_per_step=None)
    assert found.busy_s is None
    assert "not known" in found.note


def test_lost_eager_kernels_are_noticed():
    """A full trace buffer drops kernels without any graph."""
    found = summarise(eager(40, traced=20), steps=1, graph_kernels_per_step=0)
    assert found.busy_s is None
    assert found.note == "only 20 of 40 expected kernels were traced"


def test_graphs_that_never_launched_are_noticed():
    """An arm that should replay and ran eagerly lacks its nodes."""
    assert summarise(eager(5), steps=1, graph_kernels_per_step=50).busy_s is None


def test_a_trace_without_the_loop_is_an_error():
    """A whole request's kernels would be taken for the loop's."""
    with pytest.raises(BcgbenchError, match="no denoise loop"):
        summarise(eager(3)[1:], steps=1, graph_kernels_per_step=0)


def test_no_step_is_an_error():
    """Nothing to divide by."""
    with pytest.raises(BcgbenchError, match="at least one denoise step"):
        summarise(eager(3), steps=0, graph_kernels_per_step=0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=12))
def test_union_agrees_with_counting(intervals):
    """Against a count of single nanoseconds, for nested, touching, empty and clipped intervals."""
    inside = [n for n in range(10, 50) if any(start <= n < end for start, end in intervals)]
    assert union_ns([tuple(i) for i in intervals], window=(10, 50)) == len(inside)


def test_a_cpu_run_is_profiled_and_says_that_it_has_no_gpu():
    """The real profiler and its event format, on this torch."""

    def run():
        with torch.profiler.record_function(DENOISE_SPAN):
            torch.ones(8) + 1

    if torch.cuda.is_available():
        pytest.skip("counts GPU work of the process where there is a GPU")
    found = profile_request(run, steps=1, graph_kernels_per_step=0)
    assert found.launches == {"kernel": 0, "graph": 0, "memcpy": 0, "memset": 0}
    assert (found.kernels, found.busy_s) == (0, None)
    assert found.note == "no GPU activity in the denoise loop"


def test_only_what_is_counted_is_read():
    """Thousands of operators per step are left in the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.ones(8) + 1
        with torch.profiler.record_function(DENOISE_SPAN):
            torch.ones(8) + 1
    (event,) = read_events(profiler)
    assert (event.name, event.on_gpu) == (DENOISE_SPAN, False)
    assert event.kind in {"user_annotation", ""}  # torch 2.11 does not tell
    assert event.duration_ns > 0


def test_a_profiler_without_results_is_an_error():
    """Another profiler holds the process."""

    class Nothing:
        profiler = None

    with pytest.raises(BcgbenchError, match="recorded nothing"):
        read_events(Nothing())
