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
    without: tuple[str, ...] = ()
    """Ideas of the engine that are switched off: names of `engine.options.Options`."""
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


_HIDDEN = ("kernel_breaks", "shared_results")
"""Ideas of the engine that look at single operations, which compiled code does not show."""

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
    "graph-exact": Runner(
        name="graph-exact", description="one CUDA graph of the whole forward for each prompt length, nothing padded",
        captured=True, breaks="none",
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
        name="bcg+compile", description="breakable CUDA graph of the code of compile, attention eager between the "
        "segments", padded=True, captured=True, compiled="regional", without=_HIDDEN,
    ),
    "graph+compile": Runner(
        name="graph+compile", description="one CUDA graph of the whole forward, of the code of compile", padded=True,
        captured=True, breaks="none", compiled="regional", without=_HIDDEN,
    ),
}  # fmt: skip

_SCHEME_OF_SGLANG = (
    "skip_unchanged",
    "known_calls",
    "shared_results",
    "kernel_breaks",
    "pooled_outputs",
    "pulled_outputs",
    "first_block",
)
ONE_OFF = {
    "bcg-sglang": Runner(
        name="bcg-sglang", padded=True, captured=True, breaks="attention", without=_SCHEME_OF_SGLANG,
        description="bcg by the scheme of SGLang's runner: all inputs copied, break outputs outside the pool",
    ),
    "graph-plain": Runner(
        name="graph-plain", description="the whole graph, equal small results made in each block again", padded=True,
        captured=True, breaks="none", without=("shared_results",),
    ),
    **{
        f"bcg-{name}": Runner(name=f"bcg-{name}", padded=True, captured=True, breaks="attention",
                              without=(idea,), description=f"bcg, {what}")
        for name, idea, what in (
            ("repeat-all", "shared_results", "equal small results made in each block again"),
            ("copy-all", "skip_unchanged", "every input copied at every call"),
            ("walk-all", "known_calls", "every call's arguments walked for its signature"),
            ("call-breaks", "kernel_breaks", "broken at the attention function, not at its kernel"),
            ("own-outputs", "pooled_outputs", "break outputs held outside the pool"),
            ("copied-outputs", "pulled_outputs", "break outputs copied between two graphs, not in the next"),
            ("own-inputs", "borrowed_inputs", "break inputs held for ever"),
            ("grown-pool", "first_block", "a pool that grows by itself"),
        )
    },
}  # fmt: skip
"""`bcg` with ideas of the engine switched off: beside `bcg`, what each gains."""
RUNNERS |= ONE_OFF


def runner(name: str) -> Runner:
    """The row of this name. Raises `UsageError` naming the known ones."""
    if name not in RUNNERS:
        raise UsageError(f"Unknown runner {name!r}. Known: {', '.join(RUNNERS)}.")
    return RUNNERS[name]
