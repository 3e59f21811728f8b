"""Every known trap of captured graphs, one test each.

Silent wrong answers, worst first. The engine must prevent each, or count a miss and answer eagerly:
  1. an output overwritten by the next replay        2. an input that changed in place and was not copied
  3. a constant, flag or mode taken for another       4. a value that the host read and a replay would freeze
  5. a host constant frozen, or changed for good      6. a copy that broadcasts or converts
  7. randomness drawn by the capture, or drawn once   8. container types lost, a caller's list changed
Errors raised, each naming what to do:
  shapes that depend on data, writes to an input, grad mode, a container that contains itself, a forward that does not
  repeat, a frozen cache. Traps of breaks stand in `test_breaks.py`, of lifetime and streams in `tests/gpu`.
Known and not seen: data changed behind torch's in-place counter.
"""

from __future__ import annotations

import contextlib
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers.utils import BaseOutput
from torch import Tensor, nn

from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graphed import GraphedForward
from bcgbench.errors import CaptureError, StaticInputError

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output(BaseOutput):
    """A model output: a dict that is also a dataclass."""

    sample: Tensor | None = None


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def x(*values: float) -> Tensor:
    """A float tensor of three entries."""
    return torch.tensor(values or (1, 2, 3), dtype=torch.float32)


def captured(forward, module: nn.Module | None = None, **arguments: Any) -> GraphedForward:
    """`forward` captured for these arguments without breaks, frozen."""
    engine = GraphedForward(forward, device=torch.device("cpu"), policy=BreakPolicy(), module=module)
    engine.prepare(arguments)
    engine.freeze()
    return engine


def only_miss(engine: GraphedForward) -> Any:
    """The one miss that was counted."""
    (miss,) = engine.cache.misses.values()
    return miss


class TestSilent:
    def test_an_output_is_not_overwritten_by_the_next_replay(self):
        """The caller gets a copy of the graph's memory."""
        engine = captured(lambda a: a["x"] * 2, x=x())
        first = engine({"x": x(1, 1, 1)})
        engine({"x": x(9, 9, 9)})
        assert first.tolist() == [2, 2, 2]

    def test_an_input_changed_in_place_is_copied_again(self):
        """Same object, new version: schedulers update latents like this."""
        latents = x()
        engine = captured(lambda a: a["x"] * 2, x=latents)
        latents.mul_(10)
        assert engine({"x": latents}).tolist() == [20, 40, 60]

    def test_an_equal_input_is_another_object(self):
        """A new object is copied even if its in-place counter says what the last one's said."""
        engine = captured(lambda a: a["x"] * 2, x=x())
        for value in range(5):
            assert engine({"x": torch.full((3,), float(value))}).tolist() == [2 * value] * 3

    def test_an_input_changed_through_a_view_is_copied_again(self):
        """Views share their base's counter."""
        latents = x()
        engine = captured(lambda a: a["x"] * 2, x=latents)
        latents[1:].zero_()
        assert engine({"x": latents}).tolist() == [2, 0, 0]

    def test_an_inference_tensor_is_always_copied(self):
        """It has no in-place counter, so nothing tells whether it changed."""
        with torch.inference_mode():
            latents = x()
            engine = captured(lambda a: a["x"] * 2, x=latents)
            latents.mul_(10)
            assert engine({"x": latents}).tolist() == [20, 40, 60]

    def test_a_write_through_data_is_not_seen(self):
        """Documented: `.data` and raw pointers go behind torch's counter. Pass a new tensor instead."""
        latents = x()
        engine = captured(lambda a: a["x"] * 2, x=latents)
        latents.data.mul_(10)
        assert engine({"x": latents}).tolist() == [2, 4, 6], "seen by now: correct the text of StaticInputs"
        assert engine({"x": latents.clone()}).tolist() == [20, 40, 60]

    @pytest.mark.parametrize(("held", "asked"), [(1, True), (1, 1.0), (0.0, -0.0), (None, False), ("a", "b")])
    def test_constants_that_python_calls_equal_are_a_miss(self, held: Any, asked: Any):
        """True == 1 == 1.0 as dictionary keys; a model tells them apart."""
        engine = captured(lambda a: (a["x"] * 2, repr(a["flag"])), x=x(), flag=held)
        assert engine({"x": x(), "flag": asked})[1] == repr(asked)
        assert only_miss(engine).difference == (f"flag: captured {held!r}, asked {asked!r}",)

    @pytest.mark.parametrize(
        "read",
        [
            lambda t: t.sum().item(), lambda t: float(t.sum()), lambda t: int(t.sum()), lambda t: bool(t.sum() > 10),
            lambda t: 1 if t.sum() > 10 else 2, lambda t: t.tolist()[0], lambda t: float(t.numpy()[0]),
            lambda t: float(np.asarray(t)[0]), lambda t: len(t.nonzero()), lambda t: len(torch.argwhere(t)),
            lambda t: len(torch.where(t)[0]), lambda t: torch.equal(t, x()), lambda t: torch.allclose(t, x()),
            lambda t: 0.0 in t, lambda t: len(f"{t.sum():.1f}"), lambda t: len(range(t.int()[1])),
            lambda t: torch.tensor([t.sum(), 1.0, 2.0]), lambda t: torch.as_tensor([t[0], 1, 2]),
            lambda t: t.new_tensor([t.sum(), 1.0, 2.0]), lambda t: t[: t.long()[1] % 3].sum(),
            lambda t: t[t.argmin()], lambda t: torch.full((3,), t[0]),
        ],
        ids=["item", "float", "int", "bool", "if", "tolist", "numpy", "array", "nonzero", "argwhere", "where", "equal",
             "allclose", "in", "format", "range", "tensor of tensors", "as_tensor of tensors", "new_tensor of tensors",
             "slice", "index", "fill"],
    )  # fmt: skip
    def test_a_host_read_is_guarded(self, read):
        """Replayed while the value holds, a counted eager call when it does not; never the captured value."""

        def forward(a):
            return a["x"] + read(a["x"] * 2)

        engine = captured(forward, x=x())
        assert bit_equal(engine({"x": x()}), forward({"x": x()}))
        assert engine.replays == 1
        other = x(400, 0, 6)
        assert bit_equal(engine({"x": other}), forward({"x": other}))
        if engine.fallbacks:
            assert "test_footguns.py" in only_miss(engine).reason

    def test_a_read_zero_keeps_its_sign(self):
        """0.0 == -0.0, and 1/x tells them apart."""
        engine = captured(lambda a: a["x"] / a["x"][0].item(), x=x(0.0, 1, 1))
        assert engine({"x": x(-0.0, 1, 1)}).tolist()[1:] == [float("-inf")] * 2

    def test_a_read_nan_equals_itself(self):
        """NaN is no reason for a miss at every call."""
        engine = captured(lambda a: a["x"] * len(str(a["x"].tolist())), x=x(float("nan"), 1, 1))
        engine({"x": x(float("nan"), 1, 1)})
        assert (engine.replays, engine.fallbacks) == (1, 0)

    @pytest.mark.parametrize(
        "make",
        [lambda t: torch.tensor([1.0] * 3), lambda t: torch.as_tensor([1.0] * 3), lambda t: t.new_tensor([1.0] * 3),
         lambda t: t.new_ones(3), lambda t: torch.tensor([t[0] * 0 + 1, 1.0, 1.0])],
        ids=["tensor", "as_tensor", "new_tensor", "new_ones", "tensor of tensors"],
    )  # fmt: skip
    def test_a_constant_that_the_model_writes_to_starts_afresh(self, make):
        """Kept once and served as a copy: a sum in it does not grow from replay to replay."""

        def forward(a):
            return make(a["x"]).add_(a["x"].mean()) * a["x"]

        engine = captured(forward, x=x())
        for call in (x(), x(4, 5, 6), x()):
            assert bit_equal(engine({"x": call}), forward({"x": call}))
        assert engine.replays == 3

    @pytest.mark.parametrize("scale", [torch.zeros(1), torch.zeros(3, dtype=torch.float64)])
    def test_a_copy_never_broadcasts_or_converts(self, scale: Tensor):
        """`copy_` would do both without a word."""
        engine = captured(lambda a: a["x"] * 2, x=x())
        (graph,) = engine.cache.graphs
        with pytest.raises(StaticInputError, match="never broadcast or converted"):
            graph.replay([scale])
        engine({"x": scale})
        assert engine.fallbacks == 1, "through the front door it is a miss"

    def test_the_capture_draws_nothing_and_replays_draw_like_eager(self):
        """The generator stands where it stood before the capture; each replay draws anew."""

        def forward(a):
            return a["x"] + torch.rand_like(a["x"]) + F.dropout(a["x"], 0.5)

        torch.manual_seed(3)
        engine = captured(forward, x=x())
        got = [engine({"x": x()}) for _ in range(3)]
        torch.manual_seed(3)
        for output in got:
            assert bit_equal(output, forward({"x": x()}))

    @pytest.mark.parametrize(
        "wrap", [lambda t: (t,), lambda t: [t, t], lambda t: {"a": t}, lambda t: Pair(t, 1), lambda t: Output(sample=t),
                 lambda t: {"a": [(t,), None]}], ids=["tuple", "list", "dict", "namedtuple", "ModelOutput", "nested"],
    )  # fmt: skip
    def test_output_types_are_kept(self, wrap):
        """`output.sample`, `output[0]` and unpacking go on working."""
        got, want = captured(lambda a: wrap(a["x"] * 2), x=x())({"x": x(4, 5, 6)}), wrap(x(8, 10, 12))
        assert type(got) is type(want)
        assert str(got) == str(want)

    def test_a_result_type_that_the_engine_cannot_open_is_refused(self):
        """Its tensors would not be copied out, and the captured ones returned for ever."""

        class Box:
            def __init__(self, value):
                self.value = value

        with pytest.raises(CaptureError, match="Output leaf 0"):
            captured(lambda a: Box(a["x"] * 2), x=x())

    def test_aliased_inputs(self):
        """One tensor twice has another signature than two equal tensors."""
        one, two = x(), x(4, 5, 6)
        engine = captured(lambda a: a["x"] + 2 * a["y"], x=one, y=one)
        assert engine({"x": two, "y": two}).tolist() == [12, 15, 18]
        assert engine({"x": one, "y": two}).tolist() == [9, 12, 15]
        assert (engine.replays, engine.fallbacks) == (1, 1)

    def test_expanded_inputs(self):
        """Stride 0: a batch of one timestep; the copy writes each element once."""
        engine = captured(lambda a: a["t"] * 2, t=torch.ones(1).expand(4))
        assert engine({"t": torch.full((1,), 7.0).expand(4)}).tolist() == [14] * 4
        engine({"t": torch.ones(4)})
        assert (engine.replays, engine.fallbacks) == (1, 1), "a dense tensor has other strides: a miss"

    def test_a_list_that_the_model_changes(self):
        """Each pass of the capture gets the list as it was; the caller's own is left alone."""
        engine = captured(lambda a: a["x"].pop() * 2 + len(a["x"]), x=[x(), x()])
        given = [x(), x(4, 5, 6)]
        assert engine({"x": given}).tolist() == [9, 11, 13]
        assert len(given) == 2

    @pytest.mark.parametrize("mode", ["training", "autocast", "backend", "inference"])
    def test_a_mode_that_changed_is_a_miss(self, mode: str, monkeypatch: pytest.MonkeyPatch):
        """Dropout, rounding and kernel hang on state outside the arguments."""
        from diffusers.models import attention_dispatch

        module = nn.Dropout(0.5).eval()
        engine = captured(lambda a: module(a["x"] @ a["x"]), module, x=torch.ones(2, 2))
        if mode == "training":
            module.train()
        if mode == "backend":
            backend = attention_dispatch.AttentionBackendName._NATIVE_MATH
            monkeypatch.setattr(attention_dispatch._AttentionBackendRegistry, "_active_backend", backend)
        inference = torch.inference_mode() if mode == "inference" else contextlib.nullcontext()
        with torch.autocast("cpu", enabled=mode == "autocast"), inference:
            engine({"x": torch.ones(2, 2)})
        assert (engine.replays, engine.fallbacks) == (0, 1)
        assert mode in only_miss(engine).difference[0]
