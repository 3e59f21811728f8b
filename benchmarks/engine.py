"""What the engine costs the host, and how the cost grows: `make bench`.

Each row is one cost against one size (leaves, bytes, segments, breaks) with the line through it: so much at all, so
much for each unit. A cost that does not grow like a line is marked, and the exit code is 1. On a GPU the host times are
those of the calls alone, the queue being empty before each; on a CPU segments are taped: their time is the operations'.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bcgbench.engine.breaks import BreakPolicy, break_graph, eager_on_graph
from bcgbench.engine.bridge import Bridge
from bcgbench.engine.buffers import StaticInputs
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.options import DEFAULT
from bcgbench.engine.signature import sign
from bcgbench.engine.steps import Break, Step
from bcgbench.engine.trees import Cloner

LEAST_FIT = 0.98
"""Least share of the cost's variance that its line must explain."""
STEEP = 0.1
"""A cost that grows by less than this share over the whole range does not depend on the size; no line is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cost against one size."""

    cost: str
    per: str
    sizes: list[int]
    us: list[float]
    """Microseconds at each size: the least of many calls on the host and of five captures, the median on the GPU."""

    @property
    def line(self) -> tuple[float, float]:
        """Microseconds at size 0, and for each unit."""
        slope, start = np.polyfit(self.sizes, self.us, 1)
        return float(start), float(slope)

    @property
    def fit(self) -> float:
        """Share of the variance that the line explains: 1 is a line."""
        start, slope = self.line
        rest = np.array(self.us) - start - slope * np.array(self.sizes)
        return 1 - float(rest.var() / np.var(self.us)) if np.var(self.us) else 1.0

    @property
    def linear(self) -> bool:
        """Whether the cost grows like a line, or not at all."""
        return self.fit >= LEAST_FIT or max(self.us) <= (1 + STEEP) * min(self.us)

    def stored(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self) | {"start_us": self.line[0], "slope_us": self.line[1], "fit": self.fit}


class Bench:
    """The measurements on one device."""

    def __init__(self, device: torch.device, *, repeats: int) -> None:
        self.device = device
        self._repeats = repeats
        self._empty_us = 0.0
        self._empty_us = self.host_us(lambda: None)
        """What reading the clock around a call takes."""

    def settle(self) -> None:
        """Wait until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def host_us(self, call: Callable[[], Any]) -> float:
        """Least host time of one call, less that of a call of nothing, the device idle before it."""
        times = []
        for _ in range(self._repeats):
            self.settle()
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return min(times) - self._empty_us

    def device_us(self, call: Callable[[], Any], *, calls: int = 10) -> float:
        """Time of one call on the GPU, the host ahead of it."""
        times = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / calls)
        return median(times)

    def rows(self) -> Iterator[Row]:
        """All measurements."""
        yield self.row("signature, walked", "leaf", (8, 16, 64, 256, 900), self._walked)
        yield self.row("signature, new tensors", "leaf", (8, 16, 64, 256, 900), self._like)
        yield self.row("signature, same objects", "leaf", (8, 16, 64, 256, 900), self._same)
        yield self.row("the same, in a loop", "leaf", (8, 16, 64, 256, 900), self._same_in_a_loop)
        yield self.row("inputs, unchanged", "leaf", (8, 16, 64, 256, 900), lambda n: self._copy_in(n, changed=0))
        yield self.row("inputs, all changed", "leaf", (8, 16, 64, 256), lambda n: self._copy_in(n, changed=n))
        yield self.row("output clone", "leaf", (1, 4, 16, 64), self._clone)
        yield self.row("replay without work", "break and segment", (1, 15, 30, 60, 120), self._idle)
        yield self.row("replay", "segment", (1, 15, 30, 60, 120), lambda n: self._replay(n, _bare))
        yield self.row("replay", "break with a bridge", (1, 15, 30, 60, 120), lambda n: self._replay(n, _bridged))
        yield self.row("capture", "segment", (1, 15, 30, 60, 120), self._capture)
        if self.device.type == "cuda":  # on a CPU the host copies by itself, and the caches bend the line
            yield self.row("inputs, all changed", "MiB", (1, 4, 16, 64), lambda n: self._copy_in(1, changed=1, mib=n))
            yield self.row("output clone", "MiB", (1, 4, 16, 64), lambda n: self._clone(1, mib=n))
            yield self.row("GPU time", "bare break", (0, 15, 30, 60), lambda n: self._gap(n, _bare))
            yield self.row("GPU time", "break with a bridge", (0, 15, 30, 60), lambda n: self._gap(n, _bridged))
            off = ("pulled_outputs",)
            yield self.row("GPU time", "break and copy", (0, 15, 30, 60), lambda n: self._gap(n, _bridged, off=off))

    def row(self, cost: str, per: str, sizes: tuple[int, ...], measure: Callable[[int], float]) -> Row:
        """One cost at several sizes."""
        return Row(cost=cost, per=per, sizes=list(sizes), us=[measure(size) for size in sizes])

    def _tensor(self, *, mib: float = 0) -> Tensor:
        return torch.zeros(max(4, int(mib * 2**18)), device=self.device)

    def _arguments(self, leaves: int) -> dict[str, Any]:
        """As a denoiser's: half of them tensors, in two containers."""
        half = leaves // 2
        return {"tensors": [self._tensor() for _ in range(half)], "sizes": tuple(range(leaves - half))}

    def _walked(self, leaves: int) -> float:
        arguments = self._arguments(leaves)
        return self.host_us(lambda: sign(arguments))

    def _like(self, leaves: int) -> float:
        engine, calls = self._engine(_double), [self._arguments(leaves) for _ in range(3)]
        return self.host_us(lambda: engine.sign(calls.append(calls.pop(0)) or calls[0]))  # type: ignore[func-returns-value]

    def _same(self, leaves: int) -> float:
        engine, arguments = self._engine(_double), self._arguments(leaves)
        return self.host_us(lambda: engine.sign(arguments))

    def _same_in_a_loop(self, leaves: int) -> float:
        """With everything in the processor's caches, as `timeit` has it; the row before has none of it there."""
        engine, arguments = self._engine(_double), self._arguments(leaves)
        return min(timeit.repeat(lambda: engine.sign(arguments), number=1_000, repeat=5)) * 1e3

    def _copy_in(self, leaves: int, *, changed: int, mib: float = 0) -> float:
        given: list[Any] = [self._tensor(mib=mib) for _ in range(leaves)]
        inputs = StaticInputs(given, self.device)
        calls = [[self._tensor(mib=mib) for _ in range(changed)] + given[changed:] for _ in range(2)]
        return self.host_us(lambda: inputs.update(calls.append(calls.pop(0)) or calls[0]))  # type: ignore[func-returns-value]

    def _clone(self, leaves: int, *, mib: float = 0) -> float:
        return self.host_us(Cloner(tuple([self._tensor(mib=mib) for _ in range(leaves)])))

    def _engine(self, forward: Callable[[dict[str, Any]], Any], *, off: tuple[str, ...] = ()) -> GraphedForward:
        return GraphedForward(forward, device=self.device, policy=BreakPolicy(), options=DEFAULT.without(*off))

    def _replay(self, count: int, cut: Callable[[Tensor], Tensor]) -> float:
        engine, arguments = self._engine(lambda a: _chain(a["x"], count, cut)), {"x": self._tensor()}
        engine.prepare(arguments)
        return self.host_us(lambda: engine(arguments))

    def _idle(self, breaks: int) -> float:
        """What Python does between the steps, and one copy for each break."""
        arguments, kept = {"x": self._tensor()}, self._tensor()
        bridge = Bridge(self._tensor())
        cut = Break(lambda: kept, (), {}, bridges=[(0, bridge)], single=bridge)
        steps = [cut, cast("Step", SimpleNamespace(replay=lambda: None))] * breaks
        call = sign(arguments)
        graph = SegmentedGraph(call.signature, StaticInputs(call.leaves, self.device), steps, kept, [])
        return self.host_us(lambda: graph.replay(call.leaves))

    def _capture(self, segments: int) -> float:
        arguments, times = {"x": self._tensor()}, []
        for _ in range(5):
            engine = self._engine(lambda a: _chain(a["x"], segments, _bare))
            self.settle()
            start = time.perf_counter_ns()
            engine.prepare(arguments)
            self.settle()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return min(times)

    def _gap(self, breaks: int, cut: Callable[[Tensor], Tensor], *, off: tuple[str, ...] = ()) -> float:
        """120 matrix products in as many segments as there are breaks, and one: the work is the same for any number."""
        weight = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16) / 64

        def forward(arguments: dict[str, Any]) -> Tensor:
            x: Tensor = arguments["x"]
            for number in range(120):
                x = x @ weight
                if number < 2 * breaks and number % 2 == 0:
                    x = cut(x)
            return x

        engine = self._engine(forward, off=off)
        arguments = {"x": torch.randn(1024, 4096, device=self.device, dtype=torch.bfloat16)}
        engine.prepare(arguments)
        return self.device_us(lambda: engine(arguments))


def _double(arguments: dict[str, Any]) -> Tensor:
    first: Tensor = arguments["tensors"][0]
    return first * 2


def _bare(x: Tensor) -> Tensor:
    break_graph()
    return x


_cut = eager_on_graph(lambda x: x * 1)


def _bridged(x: Tensor) -> Tensor:
    return _cut(x)


def _chain(x: Tensor, count: int, cut: Callable[[Tensor], Tensor]) -> Tensor:
    for _ in range(count - 1):
        x = cut(x + 1)
    return x + 1


def _table(rows: list[Row]) -> Iterator[str]:
    yield f"{'cost':<26}{'at all, us':>12}{'each, us':>12}  {'per':<22}{'fit':>7}  measured, us"
    for row in rows:
        start, slope = row.line
        at = "  ".join(f"{size}: {us:.1f}" for size, us in zip(row.sizes, row.us, strict=True))
        fit = f"{row.fit:.3f}" if row.linear else f"{row.fit:.3f} NOT A LINE"
        yield f"{row.cost:<26}{start:>12.2f}{slope:>12.3f}  {row.per:<22}{fit:>7}  {at}"


def main() -> int:
    """Measure, print the table, write the JSON file."""
    gc.freeze()  # a capture collects garbage: 0.15 s of walking what torch has made, and no line through the rest
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=200, help="calls per host time")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    started = time.perf_counter()
    with torch.no_grad():
        rows = list(Bench(device, repeats=options.repeats).rows())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, segments taped"
    seconds = time.perf_counter() - started
    print(f"{name}, torch {torch.__version__}, {seconds:.0f} s", *_table(rows), sep="\n")
    if options.json:
        stored = {"device": name, "torch": torch.__version__, "rows": [row.stored() for row in rows]}
        options.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.linear for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
