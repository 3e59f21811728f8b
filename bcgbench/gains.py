"""What a graph brings for what it costs: remarks on a verdict about memory, kernels and breaks. They decide nothing.

Here: published disappointments said in words, from stored figures. Not here: limits on them (`thresholds.py`), units
and layout (`reports/`). No I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from bcgbench.engagement import is_graph
from bcgbench.metrics import denoise_times
from bcgbench.stats import median
from bcgbench.types import Reason, Record, Speed

KERNELS = ("compile", "fused projections", "attention order")
"""Settings that choose the kernels: arms that differ in them run others, of another number and speed."""


def remarks(a: Record, b: Record, speed: Speed, *, least_bytes: int, kernels: float) -> Iterator[Reason]:
    """On arm `b`, a graph, against arm `a`, whose times can be compared (`speed` is a finding on them)."""
    if not is_graph(b):
        return
    yield from _no_gain(a, b, speed, least_bytes)
    if all(a.settings.get(name) == b.settings.get(name) for name in KERNELS):
        yield from _more_kernels(a, b, kernels)
        yield from _cost_of_breaks(a, b, speed)


def _no_gain(a: Record, b: Record, speed: Speed, least_bytes: int) -> Iterator[Reason]:
    peaks = [record.memory.peak_allocated_bytes if record.memory else None for record in (a, b)]
    if speed not in ("SAME", "SLOWER") or peaks[0] is None or peaks[1] is None:
        return
    more_bytes = peaks[1] - peaks[0]
    if more_bytes >= least_bytes:
        text = f"{b.runner} is {speed} and its peak is {more_bytes / 1e9:.1f} GB above that of {a.runner}, which is "
        yield Reason(code="no-gain", text=text + "the better choice here")


def _more_kernels(a: Record, b: Record, per_launch: float) -> Iterator[Reason]:
    """The same arithmetic needs no more kernels: what a replay adds shows here (pytorch#143572). Compiled code that is
    cut at its attention fuses less: 108 kernels of Z-Image."""
    if a.profile is None or b.profile is None or is_graph(a) or b.settings.get("compile"):
        return
    launches, more = b.profile.launches.get("graph", 0.0), b.profile.kernels - a.profile.kernels
    if launches and more >= per_launch * launches:
        text = f"{b.runner} runs {more:.0f} kernels per step more than {a.runner}, {more / launches:.1f} for each of "
        yield Reason(code="more-kernels", text=f"{text}{launches:.0f} graph launches; replays add work")


def _cost_of_breaks(a: Record, b: Record, speed: Speed) -> Iterator[Reason]:
    """Two graph arms that launch unlike numbers of graphs: the difference is what the breaks cost (sglang#35851)."""
    counts = [record.profile.launches.get("graph", 0.0) if record.profile else 0.0 for record in (a, b)]
    if speed not in ("FASTER", "SLOWER") or not is_graph(a) or counts[0] == counts[1] or not all(counts):
        return
    loops_s = [median(list(denoise_times(record).values())) / record.case.steps for record in (a, b)]
    per_launch_s = (loops_s[1] - loops_s[0]) / (counts[1] - counts[0])
    if per_launch_s > 0:
        text = f"{counts[0]:.0f} and {counts[1]:.0f} graph launches per step, {loops_s[0]:.4g} and {loops_s[1]:.4g} s: "
        yield Reason(code="cost-of-breaks", text=f"{text}a break costs {per_launch_s:.2g} s of each step")
