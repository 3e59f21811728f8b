"""A capture is refused with a reason, or replays exactly; either way nothing of it is left behind.

`test_footguns.py` has the traps that would be silent; here stand those that raise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcgbench.engine import breaks, capture
from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.cache import Limits
from bcgbench.engine.constants import FunctionWatch, HostConstants, Rehearsal
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graph import Break, Guard
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.recorder import Capture
from bcgbench.engine.tape import TapeBackend, TapeSegment
from bcgbench.errors import CaptureError, ReplayError, SignatureError


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def x(*values: float) -> Tensor:
    """A float tensor."""
    return torch.tensor(values or (1, 2, 3), dtype=torch.float32)


def captured(forward, module: nn.Module | None = None, *, policy: str = "none", limits=None, **arguments: Any):
    """`forward` captured for these arguments, frozen."""
    engine = GraphedForward(forward, device=torch.device("cpu"), policy=BreakPolicy.parse(policy), module=module,
                            limits=limits)  # fmt: skip
    engine.prepare(arguments)
    engine.freeze()
    return engine


class Counting(nn.Module):
    """A forward whose second part depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.steady, self.drifting = nn.Linear(3, 3), Drift()

    def forward(self, value: Tensor) -> Tensor:
        return self.drifting(self.steady(value))


class Drift(nn.Module):
    """Adds the number of calls so far."""

    def __init__(self, *, fails_in: int = 0) -> None:
        super().__init__()
        self.calls, self.fails_in = 0, fails_in

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_in:
            raise ValueError(f"call {self.calls}")
        return value + self.calls


class Pick(nn.Module):
    """Indexes with a mask."""

    def forward(self, value: Tensor) -> Tensor:
        return value[value > 1]


class TestRefused:
    def test_indexing_with_a_mask_names_module_and_line(self):
        """The shape of the result hangs on data."""
        module = nn.Sequential(Pick())
        with pytest.raises(CaptureError, match=r"indexing with a mask in 0 \(test_capture\.py:\d+\).*torch\.where"):
            captured(lambda a: module(a["x"]), module, x=x())

    @pytest.mark.parametrize(
        "operation",
        [lambda t: t.masked_select(t > 1), lambda t: t.unique(), torch.unique_consecutive,
         lambda t: torch.bincount(t.int()), lambda t: t.repeat_interleave(t.int()),
         lambda t: t.clone().index_put_((t > 1,), t.sum())],
        ids=["masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave", "index_put"],
    )  # fmt: skip
    def test_shapes_that_depend_on_data(self, operation):
        """A graph holds one shape."""
        with pytest.raises(CaptureError, match="depends on data"):
            captured(lambda a: operation(a["x"]), x=x())

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_a_write_to_an_input(self, mode):
        """Clamping is idempotent, so the output check alone would not see it."""
        with mode(), pytest.raises(CaptureError, match="writes to its tensor argument 0 in place"):
            captured(lambda a: a["x"].clamp_(max=2) * 2, x=x())

    def test_a_write_to_an_object(self):
        """Its state is in the signature, as a constant: a replay would leave it as it is."""

        class Cache:
            def __init__(self) -> None:
                self.rows: list[Tensor] = []

        def forward(a):
            if len(a["cache"].rows) < 5:
                a["cache"].rows.append(a["x"] * 2)
            return a["x"] + 1

        with pytest.raises(CaptureError, match=r"changes its argument cache, an object"):
            captured(forward, x=x(), cache=Cache())
        full = Cache()
        full.rows = [x()] * 5
        assert captured(forward, x=x(), cache=full)({"x": x(4, 5, 6), "cache": full}).tolist() == [5, 6, 7]

    def test_grad_mode(self):
        """A graph has no backward pass."""
        with torch.enable_grad(), pytest.raises(CaptureError, match=r"torch\.no_grad"):
            captured(lambda a: a["x"] * 2, x=x())

    def test_an_argument_that_contains_itself(self):
        """A key is finite."""
        loop: list[Any] = [x()]
        loop.append(loop)
        with pytest.raises(SignatureError, match="contains itself"):
            captured(lambda a: a["x"][0] * 2, x=loop)

    def test_a_host_constant_that_changes_from_call_to_call(self):
        """The graph would keep the first."""
        step = iter(range(10))
        with pytest.raises(CaptureError, match=r"tensor in .* made a device tensor from other host values"):
            captured(lambda a: a["x"] * torch.tensor([next(step)]), x=x())

    def test_a_host_constant_that_comes_and_goes(self):
        """Made in the rehearsal only."""
        step = iter(range(10))
        with pytest.raises(CaptureError, match="was missing"):
            captured(lambda a: a["x"] * (torch.tensor([1]) if next(step) < 2 else 1), x=x())

    def test_a_forward_that_does_not_repeat_names_the_first_module_that_differs(self):
        """A counter in a submodule: the modules before it are not blamed."""
        module = Counting()
        with pytest.raises(CaptureError, match="first differing module: drifting"):
            captured(lambda a: module(a["x"]), module, x=x())

    @pytest.mark.parametrize("result", [lambda n: n, lambda n: None if n % 2 else x(), lambda n: [x()] * n])
    def test_a_result_that_is_no_tensor_and_does_not_repeat(self, result):
        """A count or a None in the output would be frozen."""
        count = iter(range(10))
        with pytest.raises(CaptureError, match=r"in one call|the call before"):
            captured(lambda a: (a["x"] * 2, result(next(count))), x=x())

    def test_a_frozen_cache_never_captures(self):
        """A capture in a measured request would be timed."""
        engine = captured(lambda a: a["x"] * 2, x=x())
        assert engine({"x": torch.ones(5)}).tolist() == [2] * 5
        with pytest.raises(CaptureError, match="frozen"):
            engine.prepare({"x": torch.ones(5)})
        assert engine.cache.captures == 1


class TestFailure:
    """What is left after a capture that raised."""

    def test_an_error_that_eager_raises_too_is_left_as_it_is(self):
        """The warm call raises it: no matter of graphs."""
        with pytest.raises(RuntimeError, match="size"):
            captured(lambda a: a["x"] @ a["x"][:2], x=x())

    def test_an_error_of_the_capturing_call_alone_is_a_capture_error(self):
        """With the place, the cause and what to do."""
        module = nn.Sequential(nn.Identity(), Flaky())
        with pytest.raises(CaptureError, match=r"Capture failed in 1 \(test_capture\.py:\d+\): ValueError.*--break"):
            captured(lambda a: module(a["x"]), module, x=x())

    def test_the_engine_is_usable_afterwards(self):
        """Patches are undone, the generator is where it was, the same engine captures and replays."""
        attention = F.scaled_dot_product_attention
        module = Flaky()
        engine = GraphedForward(lambda a: module(torch.rand_like(a["x"]) + a["x"]), device=torch.device("cpu"),
                                module=module, policy=BreakPolicy.parse("attention"))  # fmt: skip
        state = torch.get_rng_state()
        with pytest.raises(CaptureError):
            engine.prepare({"x": x()})
        assert F.scaled_dot_product_attention is attention
        assert torch.equal(torch.get_rng_state(), state)
        assert len(engine.cache) == 0
        module.calls = 10
        engine.prepare({"x": x()})
        torch.manual_seed(1)
        got = engine({"x": x(4, 5, 6)})
        torch.manual_seed(1)
        assert torch.equal(got, torch.rand(3) + x(4, 5, 6))
        assert engine.replays == 1

    def test_an_error_while_looking_for_the_first_differing_module_is_a_capture_error(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        """That is a second capture: what it leaves behind is cleaned up as after the first."""
        recovered: list[str] = []
        monkeypatch.setattr(TapeBackend, "recover", lambda _backend: recovered.append("second"))
        module = nn.Sequential(Drift(fails_in=6))
        with pytest.raises(CaptureError, match=r"Capture failed in 0 .*call 6"):
            captured(lambda a: module(a["x"]), module, x=x())
        assert recovered == ["second"]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
    def test_an_interrupt_and_lack_of_memory_stay_what_they_are(self, error: type[BaseException]):
        """Both have their own ending of a case."""
        count = iter(range(10))

        def forward(a):
            if next(count) == 2:
                raise error
            return a["x"] * 2

        with pytest.raises(error):
            captured(forward, x=x())

    def test_lack_of_memory_for_a_bridge_ends_the_open_segment(self, monkeypatch: pytest.MonkeyPatch):
        """A CUDA stream left in capture mode would cost the whole process."""
        abandoned: list[str] = []

        def full(_segment: TapeSegment, _result: Tensor) -> Any:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(TapeSegment, "bridge", full)
        monkeypatch.setattr(TapeSegment, "abandon", lambda _segment: abandoned.append("open"))
        with pytest.raises(torch.OutOfMemoryError):
            captured(lambda a: breaks.eager_on_graph(torch.neg)(a["x"] + 1) + 1, x=x())
        assert abandoned == ["open"]

    def test_more_steps_than_the_limit(self):
        """A break in a loop over tokens."""

        def forward(a):
            for _ in range(5):
                a = {"x": a["x"] + 1}
                breaks.break_graph()
            return a["x"]

        with pytest.raises(CaptureError, match=r"has 10 steps, the limit is 9"):
            captured(forward, x=x(), limits=Limits(steps=9))

    def test_a_replay_that_raises_is_an_error_and_no_eager_call(self):
        """Whatever a break raises: a silent eager answer would be timed as a graph's."""

        @breaks.eager_on_graph
        def fussy(value: Tensor) -> Tensor:
            if value.sum() > 10:
                raise ValueError("too much")
            return value * 2

        engine = captured(lambda a: fussy(a["x"] + 0) + 1, x=x())
        with pytest.raises(ReplayError, match="ValueError: too much"):
            engine({"x": x(4, 5, 6)})
        assert (engine.replays, engine.fallbacks) == (0, 0)
        assert engine({"x": x()}).tolist() == [3, 5, 7], "the graph is usable after the error"


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        ("none", "--break auto would break there, if a torch call raised"),
        ("auto", "--break auto could not break there"),
    ],
)
def test_a_failed_capture_says_the_line_and_whether_auto_would_help(policy: str, advice: str):
    """The message is what an engineer acts on."""
    calls = iter(range(9))

    def forward(a):
        y = a["x"] * 2
        return y if next(calls) < 2 else y + int("no number")

    with pytest.raises(CaptureError) as found:
        captured(forward, policy=policy, x=x())
    assert "ValueError: invalid literal" in str(found.value)
    assert '(at `return y if next(calls) < 2 else y + int("no number")`)' in str(found.value)
    assert advice in str(found.value)


class Flaky(nn.Module):
    """Raises in its third call only: the capturing one."""

    calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("third time unlucky")
        return value * 1


class TestSteps:
    """What a capture consists of."""

    def test_segments_breaks_and_guards_are_one_ordered_list(self):
        """In the order of the forward; a break outside any segment work leaves no empty segment."""

        @breaks.eager_on_graph
        def half(value: Tensor) -> Tensor:
            return value / 2

        def forward(a):
            y = half(half(a["x"] + 1))
            return y * 2 if (y + 1).sum().item() > 0 else y

        (graph,) = captured(forward, x=x()).cache.graphs
        kinds = ["b" if isinstance(step, Break) else "g" if isinstance(step, Guard) else "s" for step in graph.steps]
        assert "".join(kinds) == "sbbsgs"
        assert (graph.segments, graph.breaks) == (3, 2)
        assert graph.nodes == 4

    def test_three_forwards_per_capture(self):
        """Warm, rehearsal, capture; none for a signature that is held, none for an eager arm."""
        calls = []
        engine = captured(lambda a: calls.append(1) or a["x"] * 2, x=x())
        engine.cache.frozen = False
        assert engine.prepare({"x": x(4, 5, 6)}) is engine.cache.graphs[0]
        assert len(calls) == engine.prepare_forwards == 3
        eager = GraphedForward(lambda a: a["x"] * 2, device=torch.device("cpu"), policy=None)
        assert eager.prepare({"x": x()}) is None
        assert eager({"x": x()}).tolist() == [2, 4, 6]
        assert (eager.calls, eager.replays, eager.fallbacks) == (1, 0, 0)

    def test_what_the_graph_reads_and_nobody_owns_is_kept(self):
        """A table made by an earlier call and dropped by its owner (cached RoPE)."""
        cache = {"table": x(10, 20, 30)}
        engine = captured(lambda a: a["x"] + cache["table"], x=x())
        del cache["table"]
        assert engine({"x": x(1, 1, 1)}).tolist() == [11, 21, 31]

    def test_equal_host_constants_share_one_tensor(self):
        """GLM-Image makes the same two RoPE tables 120 times per forward. Each use has a copy to write to."""

        def forward(a):
            y = a["x"]
            for number in range(6):
                y = y + torch.tensor([1.0, 2.0, float(number % 2)]).mul_(2)
            return y

        constants, arguments = HostConstants(torch.device("cpu")), {"x": x()}
        with FunctionWatch(Rehearsal(constants).handle):
            forward(arguments)
        kept = [constants.serve(torch.tensor, {"args": ([1.0, 2.0, float(number % 2)],)}) for number in range(6)]
        assert [tensor.tolist() for tensor in kept] == [[1, 2, 0], [1, 2, 1]] * 3
        assert len({id(tensor) for tensor in kept}) == 2
        assert bit_equal(captured(forward, x=x())({"x": x(4, 5, 6)}), forward({"x": x(4, 5, 6)}))

    def test_state_of_the_module_goes_on_counting(self):
        """A buffer that the forward adds to is written by each replay as by each eager call."""
        module = nn.BatchNorm1d(3).train()
        engine = captured(lambda a: (module(a["x"]), a["x"] * 2)[1], module, x=torch.rand(4, 3))
        before = int(module.num_batches_tracked)
        for _ in range(3):
            engine({"x": torch.rand(4, 3)})
        assert int(module.num_batches_tracked) == before + 3

    def test_in_place_work_on_intermediates_repeats(self):
        """Views of intermediates, slices assigned to, `out=`."""

        def forward(a):
            y = a["x"] * 1
            y[0] = y[1] + 5
            y.view(3, 1).mul_(2)
            return torch.add(y, 1, out=torch.empty(3)), y

        engine = captured(forward, x=x())
        for call in (x(4, 5, 6), x(), x(7, 8, 9)):
            assert all(map(bit_equal, engine({"x": call}), forward({"x": call})))
        assert engine.replays == 3

    def test_the_self_check_compares_bits(self, monkeypatch: pytest.MonkeyPatch):
        """A capture whose segments give another bit is refused (here: a result scaled behind the recorder's back)."""
        run = capture.Capture.run
        monkeypatch.setattr(capture.Capture, "run", lambda self, forward: run(self, forward) * (1 + 2**-23))
        with pytest.raises(CaptureError, match="does not give the eager output"):
            captured(lambda a: a["x"] * 2, x=x())


class AnotherDevice(TapeBackend):
    """A tape for which tensors of the CPU are the host's, as beside a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")


def test_a_forward_may_write_to_host_data_of_its_own():
    """What it wrote down itself is new in each call; state that it keeps between calls would stay as captured."""
    kept = x(1)

    def capture_of(forward) -> Tensor:
        backend = AnotherDevice()
        return Capture(backend, HostConstants(backend.device), module=None).run(forward)

    assert capture_of(lambda: torch.tensor([1.0, 2.0]).add_(1)).tolist() == [2.0, 3.0]
    assert capture_of(lambda: torch.zeros(2).add_(1)).tolist() == [1.0, 1.0]
    with pytest.raises(CaptureError, match="writes to a tensor of the host"):
        capture_of(lambda: kept.add_(1))
