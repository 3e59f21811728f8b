"""Where a thread hangs is told as a graph's step, the module and the line."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bcgbench.engine.breaks import BreakPolicy, eager_on_graph
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.place import place, step_place


class Inner(nn.Module):
    """Waits, when told to, in itself or in a break."""

    hold: threading.Event | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Twice the input."""
        return eager_on_graph(self.doubled)(x)

    def doubled(self, x: Tensor) -> Tensor:
        """In a break."""
        if self.hold is not None:
            self.hold.wait(10)
        return x * 2


@contextmanager
def held(inner: Inner, function: object) -> Iterator[str]:
    """The place of a thread that calls a function while the module holds it."""
    inner.hold = threading.Event()
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    try:
        while "(wait)" not in (told := place(thread.ident or 0)):
            time.sleep(0.01)
        yield told
    finally:
        inner.hold.set()
        thread.join()
        inner.hold = None


def net() -> tuple[nn.Sequential, Inner]:
    """Something before and behind the module that breaks."""
    inner = Inner()
    return nn.Sequential(nn.Linear(2, 2), inner, nn.Linear(2, 2)).eval(), inner


def test_a_replay_is_told_by_its_step_and_an_eager_call_by_its_module():
    """The line is the innermost, and the innermost of the engine."""
    model, inner = net()
    arguments = {"x": torch.ones(1, 2)}
    with torch.no_grad():
        engine = GraphedForward(lambda given: model(given["x"]), device=torch.device("cpu"), policy=BreakPolicy(),
                                module=model)  # fmt: skip
        graph = engine.prepare(arguments)
    assert graph is not None
    with held(inner, torch.no_grad()(lambda: engine(arguments))) as told:
        assert told.startswith("step 2 of 3, the break Inner.doubled in 1 (test_place.py:")
        assert "called from test_place.py:" not in told
        assert "steps.py" in told
    with held(inner, torch.no_grad()(lambda: model(torch.ones(1, 2)))) as told:
        assert told.startswith("in 1, at ")
    assert step_place(graph.steps, 2) == f"step 3 of 3, the segment between {graph.break_names[0]} and the end"


def test_a_thread_that_has_ended_is_nowhere():
    """No error: it may end while it is asked for."""
    assert place(-1) == ""
