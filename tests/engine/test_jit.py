"""Just-in-time work is noted with its place: real torch.compile and TorchScript; Triton's hook by a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from bcgbench.engine import jit


class Net(nn.Module):
    """A model whose forward calls something of the host's choice."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The function's answer."""
        return self.function(x)


def compilations(function: Any, *shapes: tuple[int, ...]) -> list[str]:
    """What one call compiles, after calls with other shapes."""
    net = Net(function)
    with torch.no_grad():
        for shape in shapes[:-1]:
            net(torch.ones(shape))
        return sorted(jit.compiled(lambda: net(torch.ones(shapes[-1])), root=net))


def test_a_recompilation_is_noted_with_its_place():
    """The first call with a shape compiles, the second does not; another number of axes compiles again."""
    torch._dynamo.reset()
    function = torch.compile(lambda x: x * 2 + 1, backend="eager")
    (found,) = compilations(function, (2,))
    assert found.startswith("compilation: torch.compile (dynamo) in Net (test_jit.py:")
    assert compilations(function, (2,), (2,)) == []
    assert len(compilations(function, (2,), (2, 2))) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is:DeprecationWarning")
def test_torchscript_compiled_in_a_forward_is_noted():
    """Through `torch.jit`, which is as it was afterwards."""
    before = torch.jit.trace
    (found,) = compilations(lambda x: torch.jit.trace(torch.relu, (x,))(x), (2,))
    assert found.startswith("compilation: TorchScript in Net (test_jit.py:")
    assert torch.jit.trace is before


def test_a_triton_kernel_made_ready_is_noted_and_the_hook_given_back(monkeypatch: pytest.MonkeyPatch):
    """Whoever had set the hook is called as before."""
    heard: list[str] = []
    runtime = SimpleNamespace(jit_post_compile_hook=lambda **kwargs: heard.append(kwargs["key"]))
    before = runtime.jit_post_compile_hook
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))

    def launch(x: Tensor) -> Tensor:
        runtime.jit_post_compile_hook(key="k", fn=SimpleNamespace(name="pack_rows"))
        return x

    (found,) = compilations(launch, (2,))
    assert found.startswith("compilation: Triton kernel pack_rows in Net (test_jit.py:")
    assert (heard, runtime.jit_post_compile_hook) == (["k"], before)
