"""A graph of torch.compile, cut where the forward is broken: each piece between two breaks is compiled by itself.

A break that ended the trace would end it for good inside of a loop over blocks (torch 2.11 and 2.13: "Failed to handle
graph break gracefully"), and so nothing could be fused across blocks.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

Compile = Callable[[GraphModule, list[Any]], Callable[..., Any]]
_PIECE = "submod_"
"""How `split_module` names what it makes; a graph may hold other modules, such as the bodies of a condition."""


def between(
    graph: GraphModule, inputs: list[Any], *, breaks: frozenset[Callable[..., Any]], compile_piece: Compile
) -> Callable[..., Any]:
    """The graph with each piece without a call of `breaks` compiled; those are called as they are."""
    parts = _parts(graph, breaks)
    if not any(node.target in breaks for node in parts):
        return compile_piece(graph, inputs)
    whole = split_module(graph, None, parts.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    for name, part in list(whole.named_children()):
        if not isinstance(part, GraphModule) or not name.startswith(_PIECE):
            continue
        broken = [node for node in part.graph.nodes if node.target in breaks]
        if broken:
            part.meta["site"] = _site(broken[0])  # which `diagnose.call_site` reads
        else:
            given = [node.meta["example_value"] for node in part.graph.nodes if node.op == "placeholder"]
            delattr(whole, name)
            setattr(whole, name, compile_piece(part, given))
    return whole


def _parts(graph: GraphModule, breaks: frozenset[Callable[..., Any]]) -> dict[Node, int]:
    """For each operation the number of its piece; a break is one, with what takes its outputs apart."""
    parts: dict[Node, int] = {}
    now = 0
    for node in graph.graph.nodes:
        if node.op in {"placeholder", "output"}:
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, Node) and source.target in breaks:
            parts[node] = parts[source]
        elif node.target in breaks:
            parts[node] = now + 1
            now += 2
        else:
            parts[node] = now
    return parts


def _site(node: Node) -> tuple[str, str]:
    """Path of the module that made a call, below the one that was traced ("" for itself), and the source line."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    path = modules[-1][0].removeprefix("L['self']").removeprefix(".") if modules else ""
    lines = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return path, f"{Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""
