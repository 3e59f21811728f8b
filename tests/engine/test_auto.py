"""Break policy `auto`: what cannot be captured runs eagerly on fresh values, everything else replays.

The traps here are silent ones: a size of the captured data baked into a replay, a value of an earlier call read again.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcgbench.engine import capture
from bcgbench.engine.auto import Plan
from bcgbench.engine.breaks import BreakPolicy, eager_on_graph
from bcgbench.engine.diagnose import same_value
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.regions import Region
from bcgbench.engine.steps import Break
from bcgbench.engine.tape import TapeSegment
from bcgbench.errors import CaptureError

CPU = torch.device("cpu")
MASKS = ([1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1])
"""As captured; as many others; none; all; one."""
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(7))


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def call(mask: list[int], seed: int = 0) -> dict[str, Tensor]:
    """A 4x4 matrix and a mask over its rows."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "m": torch.tensor(mask, dtype=torch.bool)}


def captured(forward, *, policy: str = "auto", module: nn.Module | None = None, **arguments: Any) -> GraphedForward:
    """`forward` captured for these arguments, by default for the first mask; frozen."""
    engine = GraphedForward(forward, device=CPU, policy=BreakPolicy.parse(policy), module=module)
    engine.prepare(arguments or call(MASKS[0]))
    engine.freeze()
    return engine


def check(forward, *, misses: int = 0, policy: str = "auto") -> SegmentedGraph:
    """Every mask gives eager's answer, twice; all but `misses` masks by replay. Returns the graph."""
    engine = captured(forward, policy=policy)
    for seed in (1, 2):
        for mask in MASKS:
            got, want = engine(call(mask, seed)), forward(call(mask, seed))
            assert same_value(got, want), (mask, got, want)
    assert engine.fallbacks == 2 * misses, engine.cache.misses
    (graph,) = engine.cache.graphs
    assert not graph.values, "values outlive their replay"
    return graph


def rows(a: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """An intermediate, and the rows of it that the mask selects."""
    y = a["x"] @ WEIGHT
    return y, y[a["m"]]


class TestRegions:
    """Work on tensors whose shape depends on data."""

    def test_rows_are_read_scaled_and_written_back_in_one_step(self):
        """GLM-Image drops its prior so; what comes after is captured again."""

        def forward(a):
            y = a["x"] @ WEIGHT
            y[a["m"]] *= 0.0
            return y @ WEIGHT

        graph = check(forward)
        assert (graph.segments, graph.breaks) == (2, 1)
        assert [name.split(" (")[0] for name in graph.break_names] == [
            f"torch.Tensor.__getitem__ in test_auto.py:{forward.__code__.co_firstlineno + 2} and 2 more"
        ]

    @pytest.mark.parametrize(
        "function",
        [lambda y, m: y.masked_select(m[:, None]), lambda _, m: m.nonzero(), lambda _, m: torch.where(m)[0],
         lambda y, m: (y.round() * m[:, None]).unique(), lambda y, m: torch.unique(y.round(), return_counts=True)[1],
         lambda y, m: torch.unique_consecutive(m), lambda y, m: y.repeat_interleave(m.long() + 1, 0),
         lambda _, m: torch.bincount(m.long() * 3), lambda y, m: torch.argwhere(y > m[:, None]),
         lambda y, m: torch.ops.aten.index.Tensor(y, [m])],
        ids=["masked_select", "nonzero", "where", "unique", "counts", "consecutive", "repeat", "bincount", "argwhere",
             "aten"],
    )  # fmt: skip
    def test_every_call_with_such_a_result(self, function):
        """The output is returned fresh, in the shape of the call."""
        check(lambda a: function(a["x"] @ WEIGHT, a["m"]))

    @pytest.mark.parametrize(
        "function",
        [lambda t: torch.cat(list(reversed(torch.cat([t, t, t]).chunk(2)))), lambda t: t.reshape(-1, 2),
         lambda t: t.flatten()[1:], lambda t: t.expand(3, *[-1] * t.dim()),
         lambda t: (t[:1].mul_(2), t.T.add_(1), t)[2], lambda t: t @ WEIGHT,
         lambda t: nn.functional.linear(t, WEIGHT).softmax(0), lambda t: torch.stack([t, t * 2], 1),
         lambda t: t.clone().contiguous().add_(1), lambda t: torch.tensor([[1.0, 2, 3, 4]]) * t, lambda t: t.sum(0)],
        ids=["chunk", "reshape", "flatten", "expand", "write", "matmul", "linear", "stack", "clone", "constant", "sum"],
    )  # fmt: skip
    def test_sizes_of_the_captured_values_are_not_kept(self, function):
        """Composite operations compute sizes from those of their arguments; views follow the values."""
        check(lambda a: function(rows(a)[1]))

    @pytest.mark.parametrize(
        ("function", "segments"),
        [(lambda y, t, m: y.index_put((m,), t * 2), 2), (lambda y, t, m: y.masked_scatter(m[:, None], t * 2), 2),
         (lambda y, t, m: y - t.sum(), 2), (lambda y, t, m: y.index_put_((m,), t * 2), 2),
         (lambda y, t, m: y.add_(t.mean(0).nan_to_num()), 2), (lambda y, t, m: y + t.mean(0).nan_to_num(), 1)],
        ids=["index_put", "masked_scatter", "sum", "index_put_", "add_", "add"],
    )  # fmt: skip
    def test_where_a_region_ends(self, function, segments: int):
        """A scalar, a result as large as a known argument or a write to known memory is captured again; a result that
        could have another shape stays eager, though it has the same here."""
        graph = check(lambda a: function(*rows(a), a["m"]) @ WEIGHT)
        assert graph.segments == segments

    def test_values_cross_segments(self):
        """Made in one region, used in another, after the graph wrote to the memory that they came from."""

        def forward(a):
            y, t = rows(a)
            kept = y[~a["m"]]
            z = (y.mul_(2) @ WEIGHT).relu_()
            z[a["m"]] = t
            w = z @ WEIGHT
            w[~a["m"]] += kept
            return w + 1

        assert check(forward).breaks == 4

    def test_a_view_of_known_memory_with_an_unknown_shape(self):
        """What is written through it is seen by the next segment."""

        def forward(a):
            y, t = rows(a)
            y[:1].expand_as(t)[:1].mul_(2)
            return y @ WEIGHT

        check(forward)

    def test_what_does_not_hang_on_data_is_not_asked_again(self):
        """Type, device and rank of a value are the same for every mask: no step."""

        def forward(a):
            y, t = rows(a)
            z = y + 1
            if t.dtype == torch.float32 and t.dim() == 2 and not t.is_cuda:
                z = z * 2
            y[a["m"]] = t * 2
            return z + y

        assert check(forward).breaks == 2

    @pytest.mark.parametrize(
        "function",
        [lambda y, t: y * t.shape[0], lambda y, t: y * len(t), lambda y, t: y * 2 if t.numel() else -y,
         lambda y, t: sum(t, start=y[0]), lambda y, t: y * int((t * 0 + 1).sum().item())],
        ids=["shape", "len", "numel", "iterate", "item"],
    )  # fmt: skip
    def test_what_the_host_reads_of_a_value_is_a_guard(self, function):
        """Python went on with the captured size: another one is a counted miss, never a stale result."""
        check(lambda a: function(*rows(a)), misses=3)

    def test_a_copy_where_the_captured_call_returned_its_argument(self):
        """`contiguous` gives another tensor only for some shapes; the program then means something else."""

        def forward(a):
            t = rows(a)[1].t()
            u = t.contiguous()
            u.mul_(2)
            return t + u

        engine = captured(forward, **call(MASKS[4]))
        for mask in MASKS:
            assert same_value(engine(call(mask, 1)), forward(call(mask, 1)))
        assert engine.replays >= 1
        assert all("a copy, or its argument" in miss.reason for miss in engine.cache.misses.values())

    def test_autocast_inside_the_forward(self):
        """A model switches it off around its rotary embedding; a replay runs outside that block."""

        def forward(a):
            y, t = rows(a)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                u = t @ WEIGHT
                with torch.autocast("cpu", enabled=False):
                    v = t @ WEIGHT
            return u, v, y

        check(forward)

    def test_a_region_draws_like_eager(self):
        """The generator advances in the order of the forward."""

        def forward(a):
            y, t = rows(a)
            y[a["m"]] = nn.functional.dropout(t, 0.5)
            return y + torch.rand(4, 4)

        engine = captured(forward)
        for mask in MASKS:
            torch.manual_seed(3)
            got = engine(call(mask))
            torch.manual_seed(3)
            assert same_value(got, forward(call(mask)))

    def test_a_break_that_is_given_a_value_joins_the_region(self):
        """Its function is called on the fresh value."""
        twice = eager_on_graph(lambda t, n: [t * n, n])
        graph = check(lambda a: twice(rows(a)[1], 2)[0] + 1)
        assert (graph.segments, graph.breaks) == (1, 1)

    def test_attention_is_no_break(self):
        """It can be captured; `auto,attention` breaks there all the same."""

        def forward(a):
            y = a["x"][None]
            return F.scaled_dot_product_attention(y, y, y)[0][a["m"]]

        assert check(forward).breaks == 1
        assert check(forward, policy="auto,attention").breaks == 2

    def test_attention_to_rows_that_a_mask_selects_joins_the_region(self):
        """Which kernel it would take is asked apart from the forward."""

        def forward(a):
            kept = a["x"][a["m"]][None, None]
            return F.scaled_dot_product_attention(kept, kept, kept).sum() + a["x"]

        for policy in ("auto", "auto,attention"):
            assert check(forward, policy=policy).breaks == 1

    def test_outputs_are_copies_of_their_own(self):
        """A fresh output is kept by the caller; the next replay neither changes nor returns it."""
        engine = captured(lambda a: (rows(a)[1], rows(a)[0]))
        first = engine(call(MASKS[3], 1))
        kept = first[0].clone()
        second = engine(call(MASKS[0], 2))
        assert same_value(first[0], kept)
        assert second[0].shape == (2, 4)

    def test_a_value_is_dropped_after_its_last_use(self):
        """A model that goes on eagerly needs the memory of its largest moment, not of all moments."""
        alive: list[weakref.ref[Tensor]] = []

        def spy(t: Tensor) -> Tensor:
            result = t * 2
            alive.append(weakref.ref(result))
            return result

        def count(t: Tensor) -> Tensor:
            assert sum(ref() is not None for ref in alive) <= 2
            return t

        spy, count = eager_on_graph(spy), eager_on_graph(count)

        def forward(a):
            t = rows(a)[1]
            for _ in range(5):
                t = count(spy(t) + 1)
            return t

        check(forward)
        assert not any(ref() is not None for ref in alive)

    @pytest.mark.parametrize(
        ("forward", "message"),
        [
            (lambda a: torch.masked_select(a["x"], a["m"], out=torch.empty(0)), "`out=` may be resized"),
            (lambda a: (a["x"] * 2).resize_as_(rows(a)[1]), "resizes a tensor in fixed memory"),
            (lambda a: a["x"][: a["m"].nonzero()[:1, 0]], "slice is bounded by a tensor"),
            (lambda a: rows(a)[1].untyped_storage() and a["x"], "returned a UntypedStorage"),
        ],
        ids=["out", "resize", "slice", "opaque"],
    )
    def test_refused(self, forward, message: str):
        """What a replay could not repeat on other shapes."""
        with pytest.raises(CaptureError, match=message):
            captured(forward, **call(MASKS[4]))

    def test_other_policies_still_refuse(self):
        """And say what would run it."""
        with pytest.raises(CaptureError, match=r"depends on data.*--break auto"):
            captured(lambda a: rows(a)[1], policy="none")

    def test_a_forward_that_takes_another_way_in_each_call(self):
        """Calls are known by their number, so the function must be the same."""
        count = iter(range(9))
        with pytest.raises(CaptureError, match=r"called torch\.Tensor\.bool where .*__getitem__"):
            captured(lambda a: rows(a)[1] if next(count) < 2 else rows({"x": a["x"], "m": (a["m"] * a["m"]).bool()})[1])
        count = iter(range(9))
        with pytest.raises(CaptureError, match="the call before did not come here"):
            captured(lambda a: a["x"] * 2 if next(count) < 2 else rows(a)[1])


class Sine(nn.Module):
    """Sines of its input, in a loop on one line."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.sin() + 1
        return x


@pytest.fixture
def illegal(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Operations that raise while a segment records them, as a synchronising one does on a GPU."""
    names = {"aten::sin"}
    record = TapeSegment.record

    def refuse(segment: TapeSegment, func: Any, *args: Any) -> None:
        if func._schema.name in names:
            raise RuntimeError("operation not permitted when stream is capturing")
        record(segment, func, *args)

    monkeypatch.setattr(TapeSegment, "record", refuse)
    return names


class TestAttempts:
    """What is found illegal by trying."""

    def test_an_illegal_call_becomes_a_break(self, illegal: set[str]):
        """Module and line are told; every attempt is a counted forward."""
        module = nn.Sequential(nn.Linear(4, 4), Sine(), nn.Linear(4, 4))
        engine = captured(lambda a: module(a["x"]), module=module, **call(MASKS[0]))
        (graph,) = engine.cache.graphs
        assert [name.rpartition(":")[0] for name in graph.break_names] == ["torch.Tensor.sin in 1 (test_auto.py"] * 3, (
            "three calls on one line, one more attempt"
        )
        assert (engine.prepare_forwards, graph.segments) == (4, 4)
        for seed in range(3):
            made = call(MASKS[0], seed)
            assert same_value(engine(made), module(made["x"]))
        assert engine.replays == 3

    def test_other_policies_do_not_try_again(self, illegal: set[str]):
        """They say what to do."""
        with pytest.raises(CaptureError, match=r"not permitted.*--break"):
            captured(lambda a: a["x"].sin(), policy="none")

    def test_several_lines_and_dynamic_shapes(self, illegal: set[str]):
        """Regions and illegal calls in one forward, also an illegal call that writes to its argument."""
        illegal.update({"aten::cos", "aten::exp_"})

        def forward(a):
            y, t = rows(a)
            y[a["m"]] = t.sin() * 2
            z = y.sin()
            z = z.cos() + y
            z.exp_()
            return z @ WEIGHT

        graph = check(forward)
        assert sum(isinstance(step, Break) for step in graph.steps) == 3
        assert sum(isinstance(step, Region) for step in graph.steps) == 1
        assert graph.forwards == 6

    def test_too_many_attempts_name_all_that_was_tried(self, illegal: set[str], monkeypatch: pytest.MonkeyPatch):
        """The bound holds, and the message is no riddle."""
        monkeypatch.setattr(capture, "ATTEMPTS", 2)
        illegal.add("aten::cos")
        illegal.add("aten::tan")

        def forward(a):
            y = a["x"].sin()
            y = y.cos()
            return y.tan()

        with pytest.raises(CaptureError, match=r"2 captures failed.*sin at test_auto\.py:\d+; torch\.Tensor\.cos at"):
            captured(forward)

    def test_a_failure_outside_any_torch_call_is_not_retried(self):
        """Nothing is known that could run eagerly."""
        count = iter(range(9))

        def forward(a):
            if next(count) == 2:
                raise RuntimeError("a kernel of its own")
            return a["x"] * 2

        with pytest.raises(CaptureError, match="a kernel of its own"):
            captured(forward)
        assert next(count) == 3

    def test_lack_of_memory_is_not_retried(self, monkeypatch: pytest.MonkeyPatch):
        """It has its own ending of a case."""

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(TapeSegment, "record", full)
        with pytest.raises(torch.OutOfMemoryError):
            captured(lambda a: a["x"].sin())

    def test_a_failed_attempt_leaves_the_generator(self, illegal: set[str]):
        """Every pass draws alike, and the preparation nothing."""

        def forward(a):
            return torch.rand(4) + a["x"].sin() + torch.rand(4)

        torch.manual_seed(0)
        engine = captured(forward)
        got = engine(call(MASKS[0]))
        torch.manual_seed(0)
        assert same_value(got, forward(call(MASKS[0])))

    def test_constants_are_served_again_in_the_next_attempt(self, illegal: set[str]):
        """From the first."""

        def forward(a):
            y = a["x"] * torch.tensor([1.0, 2.0, 3.0, 4.0])
            return y.sin() * torch.tensor([4.0, 3.0, 2.0, 1.0])

        check(forward)

    def test_a_synchronisation_is_a_break(self, monkeypatch: pytest.MonkeyPatch):
        """It is no torch call, so its place is known beforehand; every replay waits as eager does."""
        waits: list[int] = []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(1))

        def forward(a):
            y = a["x"] * 2
            torch.cuda.synchronize()
            return y + 1

        engine = captured(forward)
        assert len(waits) == 3
        engine(call(MASKS[0]))
        assert len(waits) == 4
        assert engine.cache.graphs[0].breaks == 1

    def test_host_data_that_changes_from_call_to_call(self):
        """A replay of the break would copy what was captured."""
        plan = Plan(torch.device("meta"))
        device, host = torch.empty(3, device="meta"), torch.arange(3)
        plan.host[1] = [host.clone()]
        plan.check_host(1, Tensor.copy_, (device, host), where="copy_")
        host.add_(1)
        with pytest.raises(CaptureError, match=r"copy_ copies host data .* differently in each call"):
            plan.check_host(1, Tensor.copy_, (device, host), where="copy_")
        with pytest.raises(CaptureError, match="differently"):
            plan.check_host(2, Tensor.to, (host, "meta"), where="to")
