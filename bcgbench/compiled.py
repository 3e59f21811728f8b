"""A denoiser's forward through `torch.compile`, counted, without a trace on the module that other arms share.

Regions: `regional` compiles the blocks that the model declares repeated, once per shape for all of them, else the
whole forward; `blocks` takes the longest list of layers where none are declared; `whole` the forward. Shapes are
static: a compilation for each shape is what is fastest to run, and none may come after preparation.

In a capture, compiled code is one operation, and what the break policy names stays outside of it. Four things make that
work: the breaks are the same objects in every call, since torch.compile guards on their identity; it does not look into
them; what it traced is cut at them (`compiled_pieces`); and no `FunctionWatch` is in force inside, since it guards on
those as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch import nn

from bcgbench.compiled_pieces import between
from bcgbench.engine import trees
from bcgbench.engine.breaks import BreakPolicy, as_break, capturing, compiled_region, original_of
from bcgbench.engine.constants import unwatched
from bcgbench.engine.driver import private_bytes
from bcgbench.errors import CaptureError
from bcgbench.runners import Runner
from bcgbench.types import Compilation
from bcgbench.variant import BestEager, Switches, Variant

WARM_CALLS = 3
"""Calls of a shape before it counts as prepared: torch's own CUDA graphs warm up, record, and replay."""
SHAPES = 64
"""Compilations of one function that dynamo may hold. By default 8, shared by all blocks and arms of a process; then it
runs eagerly, with a warning alone."""
CUDAGRAPH_MODES = frozenset({"reduce-overhead", "max-autotune"})


class Compiled:
    """Stands in for a denoiser's forward; see `variant.Variant`."""

    def __init__(
        self, module: nn.Module, original: Callable[..., Any], *, runner: Runner, policy: BreakPolicy | None
    ) -> None:
        self._runner = runner
        self._policy = policy
        self._cudagraphs = runner.mode in CUDAGRAPH_MODES
        self._breaks: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._as_seen: Callable[[Callable[..., Any]], Callable[..., Any]] = _traceable
        """What torch.compile is given for a break."""
        self.pool_bytes = 0
        self._blocks = [] if runner.compiled == "whole" else _blocks(module, any_list=runner.compiled == "blocks")
        self._switches = Switches([(vars(b), "_compiled_call_impl", self._compile(b._call_impl)) for b in self._blocks])
        self._forward = original if self._blocks else self._compile(original)
        self._settled = False
        self._region_calls = self._regions = 0
        """Compiled regions run so far, and in the last forward outside of a capture."""
        self._prepared: Counter[str] = Counter()
        self._late: Counter[str] = Counter()

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(function, dynamic=False, **self._options)
        if self._policy is None:
            return compiled

        def call(*args: Any, **kwargs: Any) -> Any:
            with unwatched():
                return compiled(*args, **kwargs)

        return call

    def _as_break(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same object for a function in every call."""
        original = original_of(function)
        if original not in self._breaks:
            self._breaks[original] = self._as_seen(as_break(original))
        return self._breaks[original]

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        """One backend for all blocks: only then do they share compiled code."""
        if self._policy is None:
            return {"backend": self._runner.backend, "mode": self._runner.mode}
        return {"backend": self._regions_of}

    def _regions_of(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """A backend of torch.compile: what lies between the breaks in its graph, each piece compiled by itself."""
        return between(graph, inputs, breaks=frozenset(self._breaks.values()), compile_piece=self._region)

    def _region(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compiled code that a capture takes for one operation."""
        compiled = torch._dynamo.lookup_backend(self._runner.backend)(graph, inputs)

        def counted(*args: Any) -> Any:
            self._region_calls += 1
            return compiled(*args)

        return compiled_region(counted)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Blocks call compiled code, and the policy's functions are breaks that torch.compile leaves alone."""
        with contextlib.ExitStack() as stack:
            if self._policy is not None:
                stack.enter_context(self._policy.patched(self._as_break))
            stack.enter_context(self._switches.on())
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, regions = self._count(), self._region_calls
        if self._cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self.installed():
            output = self._forward(*args, **kwargs)
        if self._cudagraphs:
            output = trees.clone(output)  # the next call writes to the same memory
        self._check_regions(self._region_calls - regions)
        found = self._count()
        if found != before:
            (self._late if self._settled else self._prepared).update(found - before)
        return output

    def _count(self) -> Counter[str]:
        """What torch.compile counted so far; once prepared, what shows that it did anything, in a microsecond."""
        return _frames() if self._settled else _frames() + _details()

    def _check_regions(self, ran: int) -> None:
        """Raise `CaptureError` for a capture in which other code ran than was prepared: torch.compile says nothing."""
        if not capturing():
            self._regions = ran
        elif ran != self._regions:
            raise CaptureError(
                f"The forward runs {self._regions} compiled regions, in the capture {ran}: torch.compile ran the rest "
                "eagerly, or compiled anew. It guards on what differs in a capture, such as a mode or a patched "
                "function; TORCH_LOGS=recompiles names it."
            )

    def prepare(self, forward: Callable[[], Any]) -> None:
        """Compile for the shapes of a call, and run it until nothing is compiled any more."""
        before = private_bytes() if self._cudagraphs else 0
        # a break that cannot be traced ends the trace: of every frame above it, left to itself
        with torch._dynamo.config.patch(recompile_limit=SHAPES, nested_graph_breaks=self._policy is not None):
            try:
                self._warm(forward)
            except torch._dynamo.exc.TorchRuntimeError:  # a break that does not run on tensors without data
                if self._policy is None or self._as_seen is not _traceable:
                    raise
                self._breaks, self._as_seen = {}, torch.compiler.disable
                self._warm(forward)
        self.pool_bytes += private_bytes() - before if self._cudagraphs else 0

    @staticmethod
    def _warm(forward: Callable[[], Any]) -> None:
        for _ in range(WARM_CALLS):
            forward()

    def settle(self) -> None:
        """From here on every compilation is late."""
        self._settled = True

    @property
    def settings(self) -> dict[str, str]:
        where = f"{len(self._blocks)} blocks: {self._blocks[0].__class__.__name__}" if self._blocks else "whole forward"
        return {"compile": f"{where}; {self._runner.backend}, mode {self._runner.mode or 'default'}, static shapes"}

    @property
    def compilation(self) -> Compilation:
        """Counted until now."""
        prepared, late = self._prepared, self._late
        return Compilation(
            regions=self._regions, graphs=prepared["graphs"], graph_breaks=prepared["breaks"],
            cache_hits=prepared["hits"], late_frames=late["frames"], late_graphs=late["graphs"],
            cudagraph_skips=prepared["skips"] if self._cudagraphs else 0,
        )  # fmt: skip


def _traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile puts into its graph as it is, without a look inside.

    It calls it on tensors without data, for their shapes. With arguments that no graph can hold the trace ends there.
    """
    unseen = torch.compiler.disable(function)

    def broken(*args: Any, **kwargs: Any) -> Any:
        return unseen(*args, **kwargs)

    # under its own name: torch.fx writes code, which would call torch's function in place of one named alike
    functools.update_wrapper(broken, function, assigned=("__doc__",))
    allowed: Callable[..., Any] = torch.compiler.allow_in_graph(broken)
    return allowed


def variant_of(
    runner: Runner, module: nn.Module, original: Callable[..., Any], *, policy: BreakPolicy | None
) -> Variant | None:
    """What stands in for the forward of a denoiser under a runner; None for its own."""
    if runner.compiled is not None:
        return Compiled(module, original, runner=runner, policy=policy)
    return BestEager(module, original) if runner.best else None


def _blocks(module: nn.Module, *, any_list: bool) -> list[nn.Module]:
    """The blocks that the model declares repeated; else, if wanted, its longest list of layers."""
    names = getattr(module, "_repeated_blocks", None) or ()
    found = [part for part in module.modules() if type(part).__name__ in names]
    if not found and any_list:
        lists = (part for part in module.modules() if isinstance(part, nn.ModuleList))
        found = list(max(lists, key=len, default=()))
    return found


def _frames() -> Counter[str]:
    """Functions that torch.compile looked at in this process, and graphs that it made."""
    counters = torch._dynamo.utils.counters
    return Counter(frames=counters["frames"]["total"], graphs=counters["stats"]["unique_graphs"])


def _details() -> Counter[str]:
    counters = torch._dynamo.utils.counters
    return Counter(
        breaks=sum(counters["graph_break"].values()), hits=counters["inductor"]["fxgraph_cache_hit"],
        skips=counters["inductor"]["cudagraph_skips"],
    )  # fmt: skip
