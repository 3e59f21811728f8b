"""The profile pass: how many launches, kernels and busy seconds one denoise step takes. Never part of a timed pass.

Here: one profiled request, and counting in its events. Not here: timing (`measure.py`); with the profiler on, eager
takes about twice the host time, so busy time is only ever set against an unprofiled step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bcgbench.errors import BcgbenchError
from bcgbench.tap import DENOISE_SPAN
from bcgbench.types import Profile

LEAST_TRACED = 0.99
"""Share of the expected GPU activities that must be in the trace. CUPTI can drop kernels of a graph replay
(pytorch/kineto#1062), which would make a busy GPU look idle."""

LAUNCHES = {
    "cudaGraphLaunch": "graph",
    "cuGraphLaunch": "graph",
    "cudaLaunchHostFunc": None,  # runs on the host
    "cuLaunchHostFunc": None,
    "cudaLaunch": "kernel",  # Kernel, KernelExC, CooperativeKernel
    "cuLaunch": "kernel",  # Kernel, KernelEx, CooperativeKernel: Triton launches through the driver API
    "cudaMemcpy": "memcpy",
    "cuMemcpy": "memcpy",
    "cudaMemset": "memset",
    "cuMemset": "memset",
}
"""How the name of a CUDA API call begins -> what it launches; the first match counts. Suffixes are versions."""
GPU_KINDS = {"kernel": "kernel", "concurrent_kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
"""Kineto's activity type -> kind; synchronisation and annotations are neither."""
KINDS = ("kernel", "graph", "memcpy", "memset")
WAITING = "nccl"
"""How kernels begin that spin until another GPU has sent its part: they occupy a GPU, and do no work of the model."""

log = logging.getLogger(__name__)


class TraceEvent(NamedTuple):
    """One event of a trace. Times are nanoseconds of one clock, host and GPU alike."""

    name: str
    on_gpu: bool
    start_ns: int
    duration_ns: int
    kind: str = ""
    """Kineto's activity type, e.g. "kernel", "gpu_memcpy", "cuda_runtime"; "" where this torch does not tell."""


Window = tuple[int, int]


def profile_request(run: Callable[[], object], *, steps: int, graph_kernels_per_step: int | None) -> Profile:
    """Profile one request and count what its denoise loop launched, per step.

    `run` makes one request through `measure.request`, whose tap annotates the loop; `steps` is its number of denoise
    steps. `graph_kernels_per_step` is the number of kernel nodes that the graphs replay in a step, 0 for an
    arm without graphs, None where it cannot be known. Warm up first: captures and compilation would be counted.
    BcgbenchError when the trace has no denoise loop.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # Neither stacks nor shapes: they multiply the host time and change nothing that is counted. There is one cycle, so
    # acc_events only silences a warning about several.
    with profile(activities=activities, acc_events=True, record_shapes=False, with_stack=False) as profiler:
        run()
    return summarise(read_events(profiler), steps=steps, graph_kernels_per_step=graph_kernels_per_step)


def read_events(profiler: Any) -> list[TraceEvent]:
    """What the profiler recorded and `summarise` uses: the raw events, because torch's own list takes minutes."""
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        raise BcgbenchError(
            "the profiler recorded nothing; is another profiler active in this process? Run without one, or with "
            "--no-profile"
        )
    return list(_convert(results.events()))


def _convert(events: Iterable[Any]) -> Iterator[TraceEvent]:
    """Kineto events as tuples, without operators and annotations on the GPU."""
    for event in events:
        name, on_gpu = event.name(), event.device_type().name == "CUDA"
        if on_gpu and event.is_user_annotation():
            continue
        if on_gpu or name == DENOISE_SPAN or _launch(name):
            kind = event.activity_type() if hasattr(event, "activity_type") else ""
            yield TraceEvent(name, on_gpu, event.start_ns(), event.duration_ns(), kind if isinstance(kind, str) else "")


def summarise(events: Iterable[TraceEvent], *, steps: int, graph_kernels_per_step: int | None) -> Profile:
    """Counts and busy time of the denoise loop, per step; `busy_s` is None, with a note, whenever it could be wrong.

    `busy_s` is the length of the union of kernel intervals (overlapping kernels count once, copies and fills not at
    all), clipped to the loop. BcgbenchError when no annotation of the loop is among the events.
    """
    if steps < 1:
        raise BcgbenchError(f"a profile needs at least one denoise step, got {steps}")
    events = list(events)
    windows = [(e.start_ns, e.start_ns + e.duration_ns) for e in events if e.name == DENOISE_SPAN and not e.on_gpu]
    if not windows:
        raise BcgbenchError(
            f"the trace of {len(events)} events has no denoise loop: profile a call that goes through measure.request"
        )
    inside = [e for e in events if any(start <= e.start_ns < end for start, end in windows)]
    calls = [_launch(e.name) for e in inside if not e.on_gpu]
    launched = {kind: calls.count(kind) for kind in KINDS}
    traced = [e for e in inside if _gpu_kind(e) == "kernel"]
    kernels = [(e.start_ns, e.start_ns + e.duration_ns) for e in traced if not e.name.startswith(WAITING)]
    in_graphs = None if graph_kernels_per_step is None else graph_kernels_per_step * steps
    note = incomplete(launched, traced=len(traced), graph_kernels=in_graphs)
    busy_ns = sum(union_ns(kernels, window=window) for window in windows)
    if note:
        log.info("busy time not measurable: %s", note)
    return Profile(
        launches={kind: count / steps for kind, count in launched.items()},
        kernels=len(traced) / steps,
        busy_s=None if note else busy_ns / 1e9 / steps,
        note=note,
    )


def incomplete(launched: dict[str, int], *, traced: int, graph_kernels: int | None) -> str:
    """Why a trace cannot give busy time, "" if it can.

    `traced` kernels are held against what must have run: one per kernel launch of the host, and each kernel node of
    each replayed graph. Copies and fills in graphs are left out: CUPTI does not report them all, and busy time counts
    kernels alone. This also finds buffers that were lost in eager, and API calls that were recorded twice.
    """
    if not any(launched.values()) and not traced:
        return "no GPU activity in the denoise loop"
    if launched["graph"] and graph_kernels is None:
        return "graphs were launched whose number of kernels is not known, so missing ones would not be noticed"
    expected = launched["kernel"] + (graph_kernels or 0)
    if traced < LEAST_TRACED * expected:
        return f"only {traced} of {expected} expected kernels were traced"
    return ""


def union_ns(intervals: Sequence[Window], *, window: Window) -> int:
    """Nanoseconds covered by at least one of `intervals` (start, end), within `window`."""
    covered, reached = 0, window[0]
    for start, end in sorted(intervals):
        low, high = max(start, reached), min(end, window[1])
        if high > low:
            covered += high - low
            reached = high
    return covered


def _launch(name: str) -> str | None:
    """Kind of launch that a CUDA API call is, None for any other event."""
    return next((kind for prefix, kind in LAUNCHES.items() if name.startswith(prefix)), None)


def _gpu_kind(event: TraceEvent) -> str | None:
    """ "kernel" or "copy" for work on the GPU, None for the rest; by name where the kind is not told."""
    if not event.on_gpu:
        return None
    if event.kind:
        return GPU_KINDS.get(event.kind)
    return "copy" if event.name.startswith(("Memcpy", "Memset")) else "kernel"
