"""What torch does not tell about captured graphs, asked of the CUDA runtime through cuda-python; each call checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bcgbench.errors import EngineError


def _check(result: tuple[Any, ...], *, call: str) -> tuple[Any, ...]:
    status, *values = result
    if int(status) != 0:
        raise EngineError(f"{call} failed with CUDA error {int(status)} ({status}). Run the case in a new process.")
    return tuple(values)


class Nodes(NamedTuple):
    """What a graph holds."""

    total: int
    """Kernels, copies, fills and empty nodes."""
    kernels: int


def count_nodes(graph: torch.cuda.CUDAGraph) -> Nodes | None:
    """Nodes of a graph captured with `keep_graph=True`; None without cuda-python."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    handle = runtime.cudaGraph_t(graph.raw_cuda_graph())
    *_, total = _check(runtime.cudaGraphGetNodes(handle), call="cudaGraphGetNodes")
    if not total:
        return Nodes(0, 0)
    nodes, *_ = _check(runtime.cudaGraphGetNodes(handle, total), call="cudaGraphGetNodes")
    kernel = runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel
    kinds = [_check(runtime.cudaGraphNodeGetType(node), call="cudaGraphNodeGetType")[0] for node in nodes]
    return Nodes(int(total), kinds.count(kernel))


def private_bytes() -> int:
    """Bytes reserved by all private pools, those of torch's own CUDA graphs among them; 0 without a GPU."""
    snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot() if torch.cuda.is_initialized() else []
    return sum(int(segment["total_size"]) for segment in snapshot if tuple(segment["segment_pool_id"]) != (0, 0))


def pool_bytes(pools: list[Any]) -> int:
    """Bytes reserved by private graph pools."""
    wanted = {tuple(pool) for pool in pools}
    snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return sum(int(segment["total_size"]) for segment in snapshot if tuple(segment["segment_pool_id"]) in wanted)
