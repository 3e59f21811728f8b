"""One table of everything that can be read off a record: name, unit, which way is better, how to read it.

Here: single numbers of one record, unrounded SI. Not here: intervals (`stats.py`), comparisons and limits
(`verdict.py`), formatting (`reports/`). A new metric is one function and one row of `METRICS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from bcgbench.floor import peak_flops
from bcgbench.stats import log_ratios, median
from bcgbench.types import Compilation, Engagement, Memory, Profile, Record, Sample

Clock = Literal["event", "host"]
Unit = Literal["s", "bytes", "count", "ratio"]
Better = Literal["lower", "higher", "none"]
Read = Callable[[Record], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that a record holds. `read` returns None where the record does not hold it, never 0 in its place."""

    name: str
    unit: Unit
    better: Better
    description: str
    read: Read


def clock_of(record: Record) -> Clock:
    """`"event"` when every measured sample has a CUDA-event time, else `"host"`: one record never mixes clocks."""
    measured = record.measured
    return "event" if measured and all(s.denoise_event_s is not None for s in measured) else "host"


def denoise_times(record: Record, *, clock: Clock | None = None) -> dict[int, float]:
    """Round -> seconds of the denoise span; images of one round are summed. `clock` None is `clock_of(record)`."""
    chosen = clock or clock_of(record)
    times: dict[int, float] = {}
    for sample in record.measured:
        event_s = sample.denoise_event_s
        seconds = event_s if chosen == "event" and event_s is not None else sample.denoise_host_s
        times[sample.round] = times.get(sample.round, 0.0) + seconds
    return times


def paired_log_ratios(a: Record, b: Record) -> tuple[float, ...]:
    """log(a/b) of denoise times, one per round that both arms measured with the same prompts, on one clock for both."""
    clock: Clock = "event" if clock_of(a) == clock_of(b) == "event" else "host"
    a_s, b_s = denoise_times(a, clock=clock), denoise_times(b, clock=clock)
    a_prompts, b_prompts = _prompts(a), _prompts(b)
    rounds = [r for r in sorted(a_s) if r in b_s and a_prompts[r] == b_prompts[r]]
    return log_ratios([a_s[r] for r in rounds], [b_s[r] for r in rounds])


def _prompts(record: Record) -> dict[int, list[int]]:
    rounds = {s.round for s in record.measured}
    return {r: sorted(s.prompt for s in record.measured if s.round == r) for r in rounds}


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None


def _per_image(read: Callable[[Sample], float | None]) -> Read:
    return lambda record: _median(read(s) for s in record.measured)


def _of_graphs(read: Callable[[Engagement], float | None]) -> Read:
    return lambda record: None if record.engagement is None else read(record.engagement)


def _of_memory(read: Callable[[Memory], float | None]) -> Read:
    return lambda record: None if record.memory is None else read(record.memory)


def _of_profile(read: Callable[[Profile], float | None]) -> Read:
    return lambda record: None if record.profile is None else read(record.profile)


def _of_compile(read: Callable[[Compilation], float | None]) -> Read:
    return lambda record: None if record.compilation is None else read(record.compilation)


def _error_ratio(record: Record) -> float | None:
    found = record.accuracy
    return found.error / found.eager_error if found and found.error is not None and found.eager_error else None


def _denoise_s(record: Record) -> float | None:
    event = clock_of(record) == "event"
    return _median(s.denoise_event_s if event else s.denoise_host_s for s in record.measured)


def outside_s(record: Record) -> float | None:
    """Median seconds of a request outside its denoise span."""
    return _median(s.end_to_end_s - s.denoise_host_s for s in record.measured)


def break_even_images(a: Record, b: Record) -> float | None:
    """Images of this case after which what `b` took longer to prepare is saved; infinite where it saves nothing.

    None where either was not prepared or not measured.
    """
    a_s, b_s, prepare_s = _denoise_s(a), _denoise_s(b), b.prepare_s
    if a_s is None or b_s is None or prepare_s is None or {a.status, b.status} != {"OK"}:
        return None
    return max(0.0, prepare_s - (a.prepare_s or 0.0)) / (a_s - b_s) if a_s > b_s else math.inf


def _flop_use(record: Record) -> float | None:
    denoise_s, peak = _denoise_s(record), peak_flops(record)
    return record.denoise_flops / denoise_s / peak if record.denoise_flops and denoise_s and peak else None


def _largest_pixels(record: Record) -> float | None:
    gpu, memory, case = record.environment and record.environment.gpu, record.memory, record.case
    if gpu is None or memory is None or not memory.peak_reserved_bytes:
        return None
    used_bytes = memory.peak_reserved_bytes - memory.weights_bytes
    room = (gpu.memory_bytes - memory.weights_bytes) / used_bytes if used_bytes > 0 else None
    return room and room * case.width_px * case.height_px


def _step_s(record: Record) -> float | None:
    # Step 0 pays for what the host had queued before the loop, so it is a metric of its own.
    return _median(_median(s.step_s[1:]) for s in record.measured)


def _profiled_step_s(record: Record, profile: Profile) -> float | None:
    """Mean step of the profiled pass, as its loops' steps took when measured: half-size and full-size ones differ."""
    if len(profile.loop_steps) <= 1:
        return _step_s(record)
    loops = [_median(_median(_loops(s)[i][1:]) for s in record.measured) for i in range(len(profile.loop_steps))]
    if None in loops:
        return None
    return sum(n * (s or 0) for n, s in zip(profile.loop_steps, loops, strict=True)) / sum(profile.loop_steps)


def _loops(sample: Sample) -> list[tuple[float, ...]]:
    """Step times of each denoise loop."""
    ends = list(itertools.accumulate(sample.loop_steps, initial=0))
    return [sample.step_s[a:b] for a, b in itertools.pairwise(ends)]


def _gpu_busy(record: Record) -> float | None:
    # Divided by the step of the measured, unprofiled images: a profiled step is longer and would understate it.
    profile = record.profile
    step_s = profile and _profiled_step_s(record, profile)
    if profile is None or profile.busy_s is None or not step_s:
        return None
    return profile.busy_s / step_s


def _hook_share(record: Record) -> float | None:
    denoise_s, forwards = _denoise_s(record), _median(s.forwards for s in record.measured)
    if record.hook_s is None or not denoise_s or forwards is None:
        return None
    return record.hook_s * forwards / denoise_s


# fmt: off (a table is read by its columns)
_TABLE: tuple[tuple[str, Unit, Better, str, Read], ...] = (
    # Time of one image, median over the measured ones.
    ("denoise_s", "s", "lower", "denoise span by CUDA events, by host clock where there are none", _denoise_s),
    ("denoise_host_s", "s", "lower", "denoise span by synchronised host clock", _per_image(lambda s: s.denoise_host_s)),
    ("step_s", "s", "lower", "median denoise step of an image, step 0 left out", _step_s),
    ("step0_s", "s", "lower", "first denoise step", _per_image(lambda s: s.step_s[0] if s.step_s else None)),
    ("end_to_end_s", "s", "lower", "whole request, measured on its own", _per_image(lambda s: s.end_to_end_s)),
    ("encode_s", "s", "lower", "request to denoise span: text encoding, latents", _per_image(lambda s: s.before_s)),
    ("decode_s", "s", "lower", "denoise span to finished image", _per_image(lambda s: s.after_s)),
    # Time once per process, and host time per transformer call.
    ("load_s", "s", "lower", "loading the pipeline", lambda r: r.load_s),
    ("first_call_s", "s", "lower", "first request, warm-up included", lambda r: r.first_call_s),
    ("prepare_s", "s", "lower", "warm calls and captures, once per process", lambda r: r.prepare_s),
    ("signature_s", "s", "lower", "computing the signature of one call", lambda r: r.signature_s),
    ("hook_s", "s", "lower", "host time added to one call, the forward excluded", lambda r: r.hook_s),
    ("hook_share", "ratio", "lower", "share of the denoise span that the forward hook adds", _hook_share),
    # Memory.
    ("weights_bytes", "bytes", "lower", "weights on the device", _of_memory(lambda m: m.weights_bytes)),
    ("peak_allocated_bytes", "bytes", "lower", "peak in use", _of_memory(lambda m: m.peak_allocated_bytes)),
    ("peak_reserved_bytes", "bytes", "lower", "peak held", _of_memory(lambda m: m.peak_reserved_bytes)),
    ("pool_bytes", "bytes", "lower", "private pool of the graphs", _of_memory(lambda m: m.pool_bytes)),
    ("growth_bytes", "bytes", "lower", "growth per captured signature", _of_memory(lambda m: _median(m.growth_bytes))),
    (
        "largest_pixels",
        "count",
        "higher",
        "pixels that would fit, if all but the weights grows with them",
        _largest_pixels,
    ),
    # What one denoise step costs host and GPU, from the separate profiled pass.
    ("launches_per_step", "count", "lower", "host launch calls", _of_profile(lambda p: sum(p.launches.values()))),
    ("kernels_per_step", "count", "none", "kernels seen on the GPU", _of_profile(lambda p: p.kernels)),
    ("gpu_busy", "ratio", "higher", "kernel time over the unprofiled step: what is missing to 1 is idle", _gpu_busy),
    ("denoise_flops", "count", "none", "FLOP of one denoise of the first prompt", lambda r: r.denoise_flops),
    ("flop_use", "ratio", "higher", "those over the denoise time, as a share of the GPU's dense peak", _flop_use),
    # Proof of replay.
    ("captures", "count", "none", "graphs captured in all", _of_graphs(lambda e: e.captures[-1] if e.captures else 0)),
    ("segments", "count", "none", "segments of the largest graph", _of_graphs(lambda e: e.segments)),
    ("breaks", "count", "none", "breaks of the largest graph", _of_graphs(lambda e: e.breaks)),
    ("graph_nodes", "count", "none", "nodes of the largest graph", _of_graphs(lambda e: e.graph_nodes)),
    ("expected_forwards", "count", "none", "transformer calls to replay", _of_graphs(lambda e: e.expected_forwards)),
    ("replays", "count", "none", "transformer calls that were replayed", _of_graphs(lambda e: e.replays)),
    ("fallbacks", "count", "lower", "transformer calls that ran eagerly instead", _of_graphs(lambda e: e.fallbacks)),
    ("misses", "count", "lower", "calls without a graph", _of_graphs(lambda e: sum(m.count for m in e.misses))),
    ("evictions", "count", "lower", "graphs dropped for room", _of_graphs(lambda e: e.evictions)),
    ("uncalled", "count", "lower", "graphs captured and never replayed", _of_graphs(lambda e: len(e.uncalled))),
    ("prepare_forwards", "count", "lower", "forwards spent preparing", _of_graphs(lambda e: e.prepare_forwards)),
    # What torch.compile did, and what its arithmetic costs.
    ("graph_breaks", "count", "lower", "graph breaks of torch.compile", _of_compile(lambda c: c.graph_breaks)),
    ("late_compiles", "count", "lower", "graphs compiled after preparation", _of_compile(lambda c: c.late_graphs)),
    ("error_ratio", "ratio", "lower", "error over eager's, against a wider dtype, in the worst call", _error_ratio),
)
# fmt: on

METRICS: dict[str, Metric] = {
    name: Metric(name=name, unit=unit, better=better, description=description, read=read)
    for name, unit, better, description, read in _TABLE
}
"""Name -> metric, in the order of a full report."""
