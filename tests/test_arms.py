"""Arms: the hook comes and goes without a trace, and a traced call has the signature of the pipeline's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bcgbench.arms import Arm
from bcgbench.engine.signature import sign
from bcgbench.runners import RUNNERS
from bcgbench.tracer import Tracer


class Double(nn.Module):
    """A denoiser of one argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def tripled(x: Tensor) -> Tensor:
    """What the model at hand must run eagerly."""
    return x * 3


class Exchanging(nn.Module):
    """A denoiser that calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return tripled(x * 2) + 1


def arm(*modules: nn.Module, runner: str = "eager", policy: str = "attention", breaks: tuple[str, ...] = ()) -> Arm:
    """An arm on a session with these denoisers and no length policy."""
    adapter: Any = SimpleNamespace(
        forward=lambda _module, original, arguments: original(**arguments), breaks=breaks, default_buckets=()
    )
    session: Any = SimpleNamespace(
        adapter=adapter, case=SimpleNamespace(break_policy=policy, buckets=None), device=torch.device("cpu"),
        denoisers={f"transformer_{number}": module for number, module in enumerate(modules)},
        share=lambda call, arguments: call(arguments),
    )  # fmt: skip
    return Arm(RUNNERS[runner], session)


@pytest.mark.parametrize(
    "x", [torch.ones(1).expand(4), torch.ones(4, 6)[:, ::2], torch.ones(4, 6).t(), torch.ones(2, 3)],
    ids=["expanded", "with gaps", "transposed", "dense"],
)  # fmt: skip
def test_a_traced_call_has_the_signature_of_the_pipelines_own(x: Tensor):
    """A graph is captured from the traced call: other strides would be a miss at every request."""
    module = Double()
    tracer = Tracer(arm(module))
    with torch.no_grad(), tracer.recording():
        module(x)
    (traced,) = tracer.calls
    kept = traced.arguments["x"]
    assert torch.equal(kept, x)
    assert kept is not x
    assert sign(traced.arguments).signature == sign({"x": x}).signature


def test_a_traced_call_keeps_what_the_pipeline_goes_on_to_overwrite():
    """A scheduler may write to the latents in place; an object that did not change is kept once."""
    module, x = Double(), torch.ones(3)
    tracer = Tracer(arm(module))
    with torch.no_grad(), tracer.recording():
        module(x)
        module(x)
        x.zero_()
        module(x)
    first, second, third = (traced.arguments["x"] for traced in tracer.calls)
    assert first is second
    assert (first.tolist(), third.tolist()) == ([1, 1, 1], [0, 0, 0])


@pytest.mark.parametrize("own", [False, True])
def test_a_detached_arm_leaves_the_forward_as_it_was(*, own: bool):
    """Also one that stands on the instance, where accelerate's offloading puts its own."""
    module = Double()
    if own:
        module.forward = lambda x: x * 3  # type: ignore[method-assign]
    before = vars(module).get("forward")
    made = arm(module)
    with made.attached():
        assert module(torch.ones(1)).tolist() == [3 if own else 2]
    assert vars(module).get("forward") is before
    assert made.counts.forwards == 1


@pytest.mark.parametrize(
    ("runner", "policy", "count"),
    [("bcg", "attention", 1), ("bcg", "best", 1), ("bcg", "auto", 1), ("graph", "best", 0)],
)
def test_what_a_model_must_run_eagerly_breaks_under_every_policy_but_none(runner: str, policy: str, count: int):
    """The form that `best` takes is legal there, too."""
    made = arm(Exchanging(), runner=runner, policy=policy, breaks=(f"{__name__}.tripled",))
    with torch.no_grad():
        graph = made.hooks["transformer_0"].graphed.prepare({"x": torch.ones(2)})
    assert graph is not None
    assert graph.breaks == count


def test_denoisers_of_one_arm_share_a_memory_pool(monkeypatch: pytest.MonkeyPatch):
    """They run one after the other, as the buckets of one do; its bytes count once, and an eager arm has none."""
    made = arm(Double(), Double(), runner="bcg")
    first, second = (hook.graphed.backend for hook in made.hooks.values())
    assert first is second is not None
    monkeypatch.setattr(first, "pool_bytes", lambda: 1_000)
    assert made.pool_bytes == 1_000
    assert arm(Double(), Double()).pool_bytes == 0


@pytest.mark.parametrize(
    ("policy", "kept"), [("auto", "named functions alone"), ("best", "attention"), ("attention", None)]
)
def test_compiled_code_is_not_searched_for_breaks(policy: str, kept: str | None):
    """Under a search torch compiles anew, so that another code would be captured; the record says what was done."""
    (hook,) = arm(Double(), runner="bcg+compile", policy=policy).hooks.values()
    assert (hook.graphed.chosen or "").startswith(kept or "")
    assert (hook.graphed.chosen is None) == (kept is None)
    assert not hook.graphed.auto
