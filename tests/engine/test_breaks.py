"""Breaks: what they see, what they may do, and that policies are undone whatever happens."""

from __future__ import annotations

import sys
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bcgbench.engine import breaks, diagnose
from bcgbench.engine.breaks import BreakPolicy, eager_on_graph
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.steps import Break
from bcgbench.errors import CaptureError, StaticInputError, UsageError


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def x(*values: float) -> Tensor:
    """A float tensor of three entries, or of the values."""
    return torch.tensor(values or (1, 2, 3), dtype=torch.float32)


def captured(forward, *, policy: str = "none", **arguments: Any) -> GraphedForward:
    """`forward` captured for these arguments, frozen."""
    engine = GraphedForward(forward, device=torch.device("cpu"), policy=BreakPolicy.parse(policy))
    engine.prepare(arguments)
    engine.freeze()
    return engine


def check(forward, *, replays: int = 2, reason: str = "") -> GraphedForward:
    """Capture on one input, call with two others: always eager's answer, by replay or by a counted miss."""
    engine = captured(forward, x=x())
    for call in (x(4, 5, 6), x(-7, 8, 9)):
        got, want = engine({"x": call}), forward({"x": call})
        assert bit_equal(got, want), (got, want)
    assert (engine.replays, engine.fallbacks) == (replays, 2 - replays)
    for miss in engine.cache.misses.values():
        assert reason in miss.reason
    return engine


class TestValues:
    """What goes into a break and comes out of it."""

    @pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (t, 1), lambda t: {"out": [t, None]}, lambda t: [t, t]])
    def test_results_are_carried_into_the_next_segment(self, wrap):
        """In any container; what is no tensor is compared."""
        function = eager_on_graph(lambda t: wrap(t * 2))

        def first(tree):
            while not isinstance(tree, Tensor):
                tree = next(iter(tree.values() if isinstance(tree, dict) else tree))
            return tree

        check(lambda a: first(function(a["x"] + 1)) * 3)

    def test_it_sees_the_data_of_the_call_while_capturing(self):
        """Segments run as they close: metadata made from data is right."""
        seen = []
        function = eager_on_graph(lambda t: seen.append(t.tolist()) or t * 2)
        captured(lambda a: function(a["x"] + 1), x=x())
        assert seen == [[2, 3, 4]] * 3

    def test_writes_to_its_argument_and_returns_nothing(self):
        """An intermediate, a view of one, or part of one: the next segment reads what the break wrote."""

        @eager_on_graph
        def fill(target: Tensor, source: Tensor) -> None:
            target.copy_(source.flip(0))

        def forward(a):
            y = torch.zeros(5)
            fill(y[1:4], a["x"] * 2)
            return y.cumsum(0) + 1

        check(forward)

    def test_returns_its_argument(self):
        """The result is the argument itself, written in place or not."""
        function = eager_on_graph(lambda t: t.add_(1))
        check(lambda a: function(a["x"] * 1) * 2)

    @pytest.mark.parametrize(
        "function", [lambda t, u: t if t[0] > 0 else u, lambda t, _: t[1:] if t[0] > 0 else t[:2], lambda t, _: t.t()
                     if t[0] > 0 else t * 1], ids=["either", "slice", "copy"],
    )  # fmt: skip
    def test_returns_another_part_of_its_arguments_than_when_captured(self, function):
        """The next segment reads the captured place, so this is a miss."""
        function = eager_on_graph(function)
        check(lambda a: function(a["x"] * 1, a["x"] * 2) + 1, replays=1, reason="another part of its arguments")

    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (lambda t: (t * 2, int(t[0] > 0)), "a break returned 0, captured with 1"),
            (lambda t: (t * 2, "pos" if t[0] > 0 else None), "a break returned None, captured with 'pos'"),
            (lambda t: (t * 2, t * 3) if t[0] > 0 else (t * 2,), "other containers"),
            (lambda t: (t * 2, t * 3) if t[0] > 0 else [t * 2, t * 3], "other containers"),
            (lambda t: (t * 2, t * 3 if t[0] > 0 else None), "no tensor where"),
        ],
        ids=["number", "text", "fewer", "list", "none"],
    )
    def test_a_result_that_is_no_tensor_and_changes_is_a_miss(self, function, reason: str):
        """The host went on with the captured value."""
        function = eager_on_graph(function)
        check(lambda a: function(a["x"] * 1)[0] + 1, replays=1, reason=reason)

    def test_a_result_of_another_shape_is_an_error(self):
        """The next segment has one shape; this cannot be copied there."""
        function = eager_on_graph(lambda t: t[: int(t[0])] * 1)
        engine = captured(lambda a: function(a["x"] * 1) + 1, x=x(2, 2, 3))
        with pytest.raises(StaticInputError, match="output of a break"):
            engine({"x": x(1, 2, 3)})

    @pytest.mark.parametrize(
        "function", [lambda t: t.reshape(3, 1).expand(3, 4), lambda t: t.outer(t).t(), lambda t: t.outer(t)[:, ::2]]
    )
    def test_a_result_keeps_its_strides(self, function):
        """Expanded ones too: dropout draws in the order of the strides, and kernels are chosen by them."""
        function = eager_on_graph(lambda t, inner=function: inner(t * 2))
        engine = captured(lambda a: F.dropout(function(a["x"]), 0.5), x=x())
        torch.manual_seed(0)
        got = engine({"x": x(4, 5, 6)})
        torch.manual_seed(0)
        assert bit_equal(got, F.dropout(function(x(4, 5, 6)), 0.5))

    def test_a_result_no_longer_expanded_is_an_error(self):
        """The captured memory holds one row."""
        function = eager_on_graph(lambda t: (t * 2).expand(2, 3) if t[0] > 0 else torch.stack([t, t * 2]))
        engine = captured(lambda a: function(a["x"] + 0) + 1, x=x())
        with pytest.raises(StaticInputError, match="expanded output of a break"):
            engine({"x": x(-1, 2, 3)})

    def test_constants_among_its_arguments_are_frozen(self):
        """They are part of what was captured; another one is another signature."""
        function = eager_on_graph(lambda t, n: t * n)
        engine = captured(lambda a: function(a["x"] + 0, a["n"]), x=x(), n=3)
        assert engine({"x": x(4, 5, 6), "n": 3}).tolist() == [12, 15, 18]
        assert engine({"x": x(4, 5, 6), "n": 4}).tolist() == [16, 20, 24]
        assert (engine.replays, engine.fallbacks) == (1, 1)

    def test_draws_like_eager(self):
        """Randomness in a break and around it, in order."""
        noise = eager_on_graph(torch.rand_like)

        def forward(a):
            return torch.rand(3) + noise(a["x"] * 1) * 2 + torch.rand(3)

        torch.manual_seed(0)
        engine = captured(forward, x=x())
        got = [engine({"x": x()}) for _ in range(2)]
        torch.manual_seed(0)
        assert all(bit_equal(output, forward({"x": x()})) for output in got)

    def test_a_break_inside_a_break_is_part_of_it(self):
        """One step, not three."""
        inner = eager_on_graph(lambda t: t * 2)
        outer = eager_on_graph(lambda t: inner(t) + inner(t + 1))
        (graph,) = check(lambda a: outer(a["x"] + 1) * 2).cache.graphs
        assert (graph.breaks, graph.segments) == (1, 2)

    def test_telling_where_a_break_is_keeps_no_tensor_alive(self):
        """Python keeps the locals of a frame that was looked at: memory that the model had given back."""

        def holds() -> bool:
            value = x()
            gone = weakref.ref(value)
            assert "test_breaks.py" in diagnose.call_site(None)
            del value
            return gone() is not None

        assert not holds()

    def test_a_bare_break_splits_a_segment(self):
        """`break_graph()` does nothing else, and nothing at all outside a capture."""

        def forward(a):
            y = a["x"] + 1
            breaks.break_graph()
            return y * 2

        (graph,) = check(forward).cache.graphs
        assert (graph.breaks, graph.segments) == (1, 2)


class TestRefused:
    """A break that tells the code after it something in another way than by its result."""

    @pytest.mark.parametrize("use", ["operation", "break", "output"])
    def test_a_tensor_left_in_an_attribute(self, use: str):
        """The next replay's break would leave a new one, and the graph read the old."""
        state: dict[str, Tensor] = {}
        leave = eager_on_graph(lambda t: state.update(y=t * 2))
        twice = eager_on_graph(lambda t: t * 2)

        def forward(a):
            leave(a["x"] + 1)
            return {"operation": lambda t: t + 1, "break": twice, "output": lambda t: t}[use](state["y"])

        with pytest.raises(CaptureError, match=r"made but did not return.*Return it from the break"):
            captured(forward, x=x())

    def test_a_buffer_of_the_module_may_be_written(self):
        """It existed before: each replay writes to the very memory that the graph reads."""
        state = torch.zeros(3)
        leave = eager_on_graph(lambda t: state.copy_(t * 2).sum())
        check(lambda a: leave(a["x"] + 1) + state)

    @pytest.mark.parametrize(
        "function", [lambda tree: tree.pop(), lambda tree: tree.append(tree[0] * 2), lambda tree: tree.reverse()]
    )
    def test_a_list_that_it_was_given(self, function):
        """A replay would change the kept list once more at each call."""
        function = eager_on_graph(function)

        def forward(a):
            tree = [a["x"] * 1, a["x"] * 2]
            function(tree)
            return tree[-1] + 1

        with pytest.raises(CaptureError, match="changes a list or dict"):
            captured(forward, x=x())


class TestPolicies:
    def test_attention_breaks_sdpa_and_every_backend_of_diffusers_that_does_not_end_there(self):
        """Patched for the capture, restored after it."""
        from diffusers.models import attention_dispatch

        registry = attention_dispatch._AttentionBackendRegistry._backends
        before, sdpa = dict(registry), F.scaled_dot_product_attention
        with BreakPolicy.parse("attention").patched():
            assert F.scaled_dot_product_attention is not sdpa
            kept = {name.value for name, function in before.items() if registry[name] is function}
            assert kept == {"native", "_native_cudnn", "_native_efficient", "_native_flash"}
        assert F.scaled_dot_product_attention is sdpa
        assert all(registry[name] is function for name, function in before.items())
        assert registry.keys() == before.keys()

    @pytest.mark.parametrize("when", [1, 2, 3])
    def test_patches_are_undone_when_a_break_raises(self, when: int):
        """In the rehearsal or in the capturing call; in the warm call nothing is patched yet."""
        from diffusers.models import attention_dispatch

        before, sdpa = dict(attention_dispatch._AttentionBackendRegistry._backends), F.scaled_dot_product_attention
        calls = iter(range(1, 10))

        @eager_on_graph
        def fragile(t: Tensor) -> Tensor:
            if next(calls) == when:
                raise RuntimeError("no")
            return t * 2

        engine = GraphedForward(lambda a: fragile(a["x"] + 1), device=torch.device("cpu"),
                                policy=BreakPolicy.parse("attention"))  # fmt: skip
        with pytest.raises((CaptureError, RuntimeError), match="no"):
            engine.prepare({"x": x()})
        assert F.scaled_dot_product_attention is sdpa
        assert attention_dispatch._AttentionBackendRegistry._backends == before
        assert breaks._current.get() is None
        engine.prepare({"x": x()})
        assert engine({"x": x(4, 5, 6)}).tolist() == [10, 12, 14]

    def test_attention_is_a_break_and_replays_exactly(self):
        """The default policy on a bare attention."""
        q = torch.rand(1, 2, 4, 8)

        def forward(a):
            return F.scaled_dot_product_attention(a["q"] * 2, a["q"], a["q"]) + 1

        engine = captured(forward, policy="attention", q=q)
        call = torch.rand(1, 2, 4, 8)
        assert bit_equal(engine({"q": call}), forward({"q": call}))
        assert engine.cache.graphs[0].breaks == 1

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_attention_breaks_at_the_kernel(self, mode):
        """Masked: what makes an additive mask of a boolean one, three launches, stays in the segment before it."""

        def forward(a):
            return F.scaled_dot_product_attention(a["q"] * 2, a["q"], a["q"], attn_mask=a["mask"]) + 1

        def call(rows: int) -> dict[str, Tensor]:
            return {"q": torch.rand(1, 2, 4, 8), "mask": (torch.arange(4) < rows)[None]}

        with mode():
            engine = captured(forward, policy="attention", **call(3))
            (graph,) = engine.cache.graphs
            (step,) = [step for step in graph.steps if isinstance(step, Break)]
            assert step.name == "aten._scaled_dot_product_flash_attention_for_cpu"
            assert step.kwargs["attn_mask"].dtype is torch.float32
            for rows in (2, 4, 1):
                again = call(rows)
                assert bit_equal(engine(again), forward(again))
            assert engine.replays == 3

    def test_attention_without_a_kernel_breaks_as_a_whole(self):
        """Three dimensions: torch takes matrix products and a softmax."""

        def forward(a):
            return F.scaled_dot_product_attention(a["q"] * 2, a["q"], a["q"]) + 1

        engine = captured(forward, policy="attention", q=torch.rand(2, 4, 8))
        assert engine.cache.graphs[0].break_names[0].startswith("torch.nn.functional.scaled_dot_product_attention")
        call = torch.rand(2, 4, 8)
        assert bit_equal(engine({"q": call}), forward({"q": call}))

    def test_what_a_kernel_gives_beside_its_output_cannot_be_used(self):
        """It is for the backward; the next replay's would be elsewhere."""

        def forward(a):
            output, weights = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(a["q"] * 2, a["q"], a["q"])
            return output + weights.sum()

        with pytest.raises(CaptureError, match="made but did not return"):
            captured(forward, policy="attention", q=torch.rand(1, 2, 4, 8))

    def test_named_functions_of_every_kind(self, monkeypatch: pytest.MonkeyPatch):
        """Module functions, methods, static and class methods, inherited ones: called as before, and put back."""

        class Base:
            def method(self, t):
                return t * 2

            @staticmethod
            def static(t):
                return t * 3

            @classmethod
            def of_class(cls, t):
                return t * 5

        class Child(Base):
            pass

        module = ModuleType("named_functions")
        module.Base, module.Child, module.function = Base, Child, lambda t: t * 7
        monkeypatch.setitem(sys.modules, "named_functions", module)
        names = ("Base.method", "Base.static", "Base.of_class", "Child.static", "Child.method", "function")

        def forward(a):
            y = Base().method(a["x"]) + Base().static(a["x"]) + Base().of_class(a["x"]) + Base.of_class(a["x"])
            return y + Child().static(a["x"]) + Child().method(a["x"]) + module.function(a["x"])

        before = (dict(vars(Base)), dict(vars(Child)), dict(vars(module)))
        engine = captured(forward, policy=",".join(f"named_functions.{name}" for name in names), x=x())
        assert engine.cache.graphs[0].breaks == 7
        assert engine({"x": x(4, 5, 6)}).tolist() == forward({"x": x(4, 5, 6)}).tolist()
        assert (dict(vars(Base)), dict(vars(Child)), dict(vars(module))) == before

    @pytest.mark.parametrize("text", ["", "everything", "attention,everything", ","])
    def test_unknown_policies(self, text: str):
        """The message says what is known."""
        with pytest.raises(UsageError, match="expected attention, auto, best, none, or dotted names"):
            BreakPolicy.parse(text)

    def test_a_name_that_does_not_exist_leaves_no_patch(self):
        """The names before it are put back."""
        relu = F.relu
        policy = BreakPolicy.parse("torch.nn.functional.relu,torch.nn.functional.nope")
        with pytest.raises(UsageError, match=r"Break 'torch\.nn\.functional\.nope' does not exist"), policy.patched():
            pass
        assert F.relu is relu
