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
}  # fmt: skip

_SCHEME_OF_SGLANG = (
    "skip_unchanged",
    "known_calls",
    "shared_results",
    "kernel_breaks",
    "pooled_outputs",
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
            ("kernel-copies", "memcpy_bridges", "break outputs copied by a kernel, not by memcpy"),
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
