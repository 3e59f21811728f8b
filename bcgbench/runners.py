"""The arms that a case can be run with: one table. Importable without torch; `arms.py` brings a row to life.

`eager`, `bcg` and `graph` are one forward hook on one engine and differ in the columns alone, so that what they do not
share is only the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from bcgbench.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """How an arm calls the denoiser."""

    name: str
    description: str
    hooked: bool = True
    """Whether the denoiser's forward goes through the engine's hook at all."""
    padded: bool = False
    """Whether the model's length policy pads the call."""
    captured: bool = False
    """Whether calls are captured and replayed."""
    breaks: str | None = None
    """Break policy; None takes the case's."""
    best: bool = False
    """Whether eager runs with fused projections and the fastest attention kernels."""
    compiled: str | None = None
    """What goes through torch.compile: "regional" (the blocks that the model declares repeated, else the whole
    forward), "blocks" (a list of layers in place of the whole), "whole"."""
    mode: str | None = None
    """Mode of torch.compile."""
    backend: str = "inductor"
    """Backend of torch.compile."""

    @property
    def same_arithmetic(self) -> bool:
        """Whether outputs must equal eager's bit for bit; else a reference in a wider dtype judges them."""
        return not self.best and self.compiled is None


RUNNERS: dict[str, Runner] = {
    "untouched": Runner(
        name="untouched", description="the pipeline without any hook: against eager, the hook's own cost", hooked=False
    ),
    "eager": Runner(name="eager", description="eager at native prompt length, through the engine's hook"),
    "eager-padded": Runner(
        name="eager-padded", description="eager on the inputs that the graphs get: against eager, the padding's effect",
        padded=True,
    ),
    "bcg": Runner(
        name="bcg", description="breakable CUDA graph: captured segments, attention eager between them", padded=True,
        captured=True,
    ),
    "graph": Runner(
        name="graph", description="one CUDA graph of the whole forward", padded=True, captured=True, breaks="none"
    ),
    "eager-best": Runner(
        name="eager-best", description="eager with fused projections, where there are any, and the fastest attention "
        "kernels", best=True,
    ),
    "compile": Runner(
        name="compile", description="torch.compile of the repeated blocks, else of the whole forward", padded=True,
        compiled="regional",
    ),
    "compile-cudagraph": Runner(
        name="compile-cudagraph", description="torch.compile of the whole forward with CUDA graphs of its own, mode "
        '"reduce-overhead"', padded=True, compiled="whole", mode="reduce-overhead",
    ),
    # block by block and without CUDA graphs: its question is the kernels, and tuning a whole forward takes minutes
    "compile-autotune": Runner(
        name="compile-autotune", description='torch.compile of a block at a time, mode "max-autotune-no-cudagraphs": '
        "matrix products tuned", padded=True, compiled="blocks", mode="max-autotune-no-cudagraphs",
    ),
    "bcg+compile": Runner(
        name="bcg+compile", description="breakable CUDA graph of compiled blocks, attention eager between the segments",
        padded=True, captured=True, compiled="blocks",
    ),
    "graph+compile": Runner(
        name="graph+compile", description="one CUDA graph of the whole forward with compiled blocks", padded=True,
        captured=True, breaks="none", compiled="blocks",
    ),
}  # fmt: skip


def runner(name: str) -> Runner:
    """The row of this name. Raises `UsageError` naming the known ones."""
    if name not in RUNNERS:
        raise UsageError(f"Unknown runner {name!r}. Known: {', '.join(RUNNERS)}.")
    return RUNNERS[name]
