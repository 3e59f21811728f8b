"""A segment is one stretch of a forward without a break: captured once, replayed as one launch.

`CudaSegment` is a CUDA graph; `tape.TapeSegment` has its semantics on a CPU. Both have been executed once when they
close, so that a break sees real data while capturing.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from bcgbench.engine import driver
from bcgbench.engine.bridge import Bridge
from bcgbench.engine.buffers import Address, empty_like_strided
from bcgbench.engine.forks import watch_forks
from bcgbench.engine.options import DEFAULT, Options
from bcgbench.engine.pull import can_pull, cells, pull
from bcgbench.errors import ProcessPoisoned, first_line


class Segment(Protocol):
    """One captured stretch."""

    nodes: int | None
    """Operations in the segment; None if unknown."""
    kernels: int | None
    """Those of them that are kernels."""

    def begin(self) -> None:
        """Start recording."""

    def bridge(self, result: Tensor) -> tuple[Tensor, Bridge]:
        """Memory for a break's output that this segment reads: what the model goes on with, and where to copy to."""

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note an operation that ran while recording."""

    def end(self) -> None:
        """Stop recording; the segment has then been executed once."""

    def replay(self) -> None:
        """Run the segment on the current contents of the memory it reads."""

    def abandon(self) -> None:
        """Stop recording after a failure."""


class Backend(Protocol):
    """Makes segments for one device, and looks after the state that a capture may leave behind."""

    name: str
    device: torch.device
    options: Options
    forks: list[torch.cuda.Stream]
    """Side streams that the forward used since `capturing` began."""

    def segment(self) -> Segment:
        """A new segment."""

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        """Around warm calls and capture: stream, garbage collection, random state restored."""

    def rewind(self) -> None:
        """Give the generator the state it had when `capturing` began, so that every pass draws alike."""

    def recover(self) -> None:
        """After a failed capture: raise `ProcessPoisoned` unless the process is usable."""

    def check_alive(self) -> None:
        """After a replay that raised: `ProcessPoisoned` if the device is lost with it."""

    def pool_bytes(self) -> int:
        """Bytes held by the segments' private pool."""


class CudaSegment:
    """One CUDA graph in the backend's private memory pool."""

    def __init__(
        self, pool: Any, forks: list[torch.cuda.Stream], *, cells: Iterator[Tensor], carve_bytes: int = 0
    ) -> None:
        self.nodes: int | None = None
        self.kernels: int | None = None
        self._pool = pool
        self._cells = cells
        """Left for this capture's segments to read addresses from; a break for which there is none copies."""
        self._carve_bytes = carve_bytes
        self.forks = forks
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._pending: list[tuple[Bridge, Tensor]] = []
        self._bridges: list[Bridge] = []
        """Those that this segment fills itself."""

    def begin(self) -> None:
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        if self._carve_bytes:  # one block for the others to be cut from, so that they leave no gaps between them
            stream = torch.cuda.current_stream()
            block = torch.cuda.caching_allocator_alloc(self._carve_bytes, stream.device, stream)
            torch.cuda.caching_allocator_delete(block)
        for stream in self.forks:  # work that the model goes on issuing to a side stream belongs to this segment
            stream.wait_stream(torch.cuda.current_stream())

    def bridge(self, result: Tensor) -> tuple[Tensor, Bridge]:
        # Allocated inside this segment's capture, so it lives and dies in the graph pool; filled once capture ended,
        # through its address, since the model may have freed it by then.
        tensor = empty_like_strided(result, result.device)
        cell = self._pulled(tensor)
        bridge = Bridge(Address.of(tensor) if tensor.numel() else tensor, cell)
        if cell is not None:
            self._bridges.append(bridge)
        self._pending.append((bridge, result))
        return tensor, bridge

    def _pulled(self, tensor: Tensor) -> Tensor | None:
        """What the copy into `tensor`, now recorded, will read the address from; None if the break is to copy."""
        cell = next(self._cells, None) if can_pull(tensor) else None
        if cell is not None:
            pull(cell, tensor)
            for stream in self.forks:  # which may read the tensor, and began before this copy
                stream.wait_stream(torch.cuda.current_stream())
        return cell

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """CUDA records by itself."""

    def end(self) -> None:
        for stream in self.forks:
            torch.cuda.current_stream().wait_stream(stream)
        self._capture_end()
        counted = driver.count_nodes(self._graph)
        if counted is not None:
            self.nodes, self.kernels = counted
        for bridge, result in self._pending:
            bridge.fill(result)
        self._pending.clear()
        self._cells = iter(())
        if self.nodes != 0:
            self._graph.instantiate()
        self.replay()

    def _capture_end(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            self._graph.capture_end()

    def replay(self) -> None:
        if self.nodes != 0:
            self._graph.replay()
        for bridge in self._bridges:
            bridge.launched()

    def abandon(self) -> None:
        self._pending.clear()
        with contextlib.suppress(RuntimeError):  # an invalidated capture raises here, after leaving capture mode
            self._capture_end()
            return
        # ending failed, so torch left the allocator routing this capture to the pool (pytorch#180395)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)


class CudaBackend:
    """CUDA graphs of one module: one pool and one capture stream for all signatures."""

    name = "cuda"

    def __init__(self, device: torch.device, options: Options = DEFAULT) -> None:
        self.options = options
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.pools: list[Any] = [torch.cuda.graph_pool_handle()]
        """The last one serves new captures; earlier ones live on with the graphs captured before a failure."""
        self._stream = torch.cuda.Stream(self.device)
        self._cells: Iterator[Tensor] = iter(())
        self._anchor: CudaSegment | None = None
        """First segment of the pool in use: torch 2.11 refuses a pool whose last graph is gone."""
        self.forks: list[torch.cuda.Stream] = []
        self._random: Tensor | None = None

    def segment(self) -> CudaSegment:
        carve_bytes = self._first_block_bytes() if self._anchor is None else 0
        segment = CudaSegment(self.pools[-1], self.forks, carve_bytes=carve_bytes, cells=self._cells)
        self._anchor = self._anchor or segment
        return segment

    def _first_block_bytes(self) -> int:
        """What a new pool begins with, the peak of the calls before this capture. Left to grow by itself, one of
        Qwen-Image at 1024x1024 took 700 MiB in place of 598."""
        peak = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        return peak if self.options.first_block else 0

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self.device)
        self._random = torch.cuda.get_rng_state(self.device)
        self.rewind()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.forks.clear()
        gc.collect()  # freeing an old graph or tensor in the middle of a capture invalidates it
        enabled = gc.isenabled()
        gc.disable()
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream), watch_forks(self._stream, self.forks):
                if self.options.pulled_outputs:
                    self._cells = cells(self.device)
                yield
        finally:
            if enabled:
                gc.enable()
        self.rewind()
        caller.wait_stream(self._stream)

    def rewind(self) -> None:
        assert self._random is not None
        # a capture allocates its own in its pool: torch's, one per stream, are dropped whenever torch.compile records a
        # graph or a graph is freed (pytorch#192061, #193402)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.set_rng_state(self._random, self.device)

    def recover(self) -> None:
        """Leave capture mode, give the generator a state that no capture holds, and try the device."""
        assert self._random is not None
        try:
            torch.cuda.synchronize(self.device)
            fresh = torch.Generator(self.device)
            fresh.set_state(self._random)
            default = torch.cuda.default_generators[self.device.index]
            default.graphsafe_set_state(fresh.graphsafe_get_state())
            torch.rand(1, device=self.device)
            # torch 2.11 goes on believing that a pool records whose capture failed, and refuses it
            self.pools.append(torch.cuda.graph_pool_handle())
            self._anchor = None
            torch.cuda.synchronize(self.device)
            self.rewind()
        except RuntimeError as error:
            raise ProcessPoisoned(
                f"A failed capture left CUDA unusable in this process ({error}). End it and run the case in a new one."
            ) from error

    def check_alive(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise ProcessPoisoned(
                f"A replay lost the device ({first_line(error)}). Run the case in a new process."
            ) from error

    def pool_bytes(self) -> int:
        return driver.pool_bytes(self.pools)
