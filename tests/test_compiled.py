"""Arms in another arithmetic than eager's: what is compiled, counted, captured, judged, and left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from bcgbench import runners
from bcgbench.arms import Arm
from bcgbench.binding import Traced
from bcgbench.compiled_pieces import between
from bcgbench.errors import CaptureError
from bcgbench.runners import RUNNERS, Runner
from bcgbench.types import Case
from bcgbench.variant import BestEager, changes
from tests.running import records_of


class Attention(nn.Module):
    """Products around an attention, one frame below the block, as in diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.inner(x).tanh().unflatten(-1, (2, 4)).transpose(1, 2)
        return self.outer(nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """An attention with work before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x.cos()).sin()


class Blocks(nn.Module):
    """A denoiser of three equal blocks."""

    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * 2


@pytest.fixture
def module() -> nn.Module:
    """Seeded, frozen; nothing is compiled of it yet."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Blocks().eval().requires_grad_(requires_grad=False)


def arm(module: nn.Module, runner: Runner) -> Arm:
    """An arm on a session with one denoiser and no length policy."""
    adapter: Any = SimpleNamespace(
        forward=lambda _module, original, arguments: original(**arguments), breaks=(), default_buckets=(),
        pad=lambda arguments, **_: arguments, variants=lambda arguments, **_: iter([arguments]),
    )  # fmt: skip
    session: Any = SimpleNamespace(
        adapter=adapter, case=SimpleNamespace(break_policy="attention", buckets=None), device=torch.device("cpu"),
        share=lambda call, arguments: call(arguments),
        denoisers={"transformer": module},
    )  # fmt: skip
    return Arm(runner, session)


def quick(name: str) -> Runner:
    """The runner without a code generator: what dynamo found runs as it is, bit for bit."""
    return replace(RUNNERS[name], backend="eager", mode=None)


def inputs(rows: int = 5) -> Tensor:
    return torch.randn((1, rows, 8), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("name", ["compile", "compile-cudagraph", "bcg+compile", "graph+compile"])
def test_what_was_compiled_is_gone_from_the_module_afterwards(module: nn.Module, name: str):
    """Arms share the loaded pipeline: eager after a compiled arm must be eager, and no name may be patched."""
    sdpa, before = nn.functional.scaled_dot_product_attention, [dict(vars(part)) for part in module.modules()]
    compiled, x = arm(module, quick(name)), inputs()
    with torch.no_grad():
        compiled.prepare([Traced("transformer", {"x": x}, None)])
        with compiled.attached():
            module(x)
        compiled.call(Traced("transformer", {"x": x}, None))
    assert [dict(vars(part)) for part in module.modules()] == before
    assert nn.functional.scaled_dot_product_attention is sdpa


def test_equal_blocks_are_compiled_once(module: nn.Module):
    """Sixty blocks cost the compilation of one."""
    compiled = arm(module, quick("compile"))
    with torch.no_grad():
        compiled.prepare([Traced("transformer", {"x": inputs()}, None)])
    found = compiled.hooks["transformer"].variant.compilation
    assert (found.graphs, found.graph_breaks, found.late_frames) == (1, 0, 0)


def test_a_shape_that_was_not_prepared_is_a_late_compilation(module: nn.Module):
    """As a late capture is: the measured request pays for it."""
    compiled = arm(module, quick("compile"))
    with torch.no_grad():
        compiled.prepare([Traced("transformer", {"x": inputs()}, None)])
        compiled.call(Traced("transformer", {"x": inputs(rows=7)}, None))
    found = compiled.hooks["transformer"].variant.compilation
    assert found.late_frames >= found.late_graphs == 1


def test_regions_are_segments_and_the_attention_stays_outside(module: nn.Module):
    """Compiled code replays as captured on new data, bit-equal to itself uncaptured; breaks are the attention."""
    compiled = arm(module, quick("bcg+compile"))
    with torch.no_grad():
        expected = module(inputs() * 3)
        compiled.prepare([Traced("transformer", {"x": inputs()}, None)])
        assert torch.equal(compiled.call(Traced("transformer", {"x": inputs() * 3}, None)), expected)
    (graph,) = compiled.graphs
    found = compiled.hooks["transformer"].variant.compilation
    assert (graph.breaks, found.late_frames, compiled.counts.replays) == (3, 0, 1)
    assert found.regions == 2 * graph.breaks  # before and after each, however many frames are above it
    assert all("scaled_dot_product_attention" in name for name in graph.break_names)


def test_a_forward_without_declared_blocks_is_compiled_as_one_and_cut_at_its_breaks(module: nn.Module):
    """What lies between two breaks is one piece, across blocks; an arm after it compiles the whole as before."""
    module._repeated_blocks = ()
    captured, whole = arm(module, quick("bcg+compile")), arm(module, quick("compile"))
    with torch.no_grad():
        captured.prepare([Traced("transformer", {"x": inputs()}, None)])
        assert torch.equal(captured.call(Traced("transformer", {"x": inputs() * 3}, None)), module(inputs() * 3))
        whole.prepare([Traced("transformer", {"x": inputs()}, None)])
    found = captured.hooks["transformer"].variant.compilation
    assert (found.regions, captured.graphs[0].breaks, found.graphs, found.graph_breaks) == (4, 3, 1, 0)
    assert whole.hooks["transformer"].variant.compilation.graphs == 1


class Opaque:
    """No graph of torch.compile can hold it."""


BREAKS = {
    "plain": lambda x, _: x * 2,
    "leaves torch": lambda x, _: torch.from_numpy(x.numpy() * 2),
    "asks for a value": lambda x, _: x * (2 if x.sum().item() < 1e9 else 3),
    "asks for a shape": lambda x, _: x * min(x.nonzero().shape[0], 2),
    "is given an object": lambda x, kept: x * 2 if isinstance(kept["o"], Opaque) else x,
}


class Broken(Block):
    """Calls a function that the break policy names."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(named.function(x, **named.given))


named = SimpleNamespace(function=None, given={})


@pytest.mark.parametrize("declared", [("Broken",), ()])
@pytest.mark.parametrize("kind", list(BREAKS))
def test_whatever_a_break_does_stays_outside_of_compiled_code(
    kind: str, declared: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """Traced where that is possible; else it ends the trace, as before torch.compile could be told not to look."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Blocks()
    module.layers, module._repeated_blocks = nn.ModuleList(Broken() for _ in range(3)), declared
    module.eval().requires_grad_(requires_grad=False)
    monkeypatch.setattr(named, "function", lambda x, **kept: BREAKS[kind](x, kept))
    monkeypatch.setattr(named, "given", {"o": Opaque()} if kind == "is given an object" else {})
    policy = "attention,tests.test_compiled.named.function"
    captured, other = arm(module, replace(quick("bcg+compile"), breaks=policy)), inputs() * 3
    with torch.no_grad():
        captured.prepare([Traced("transformer", {"x": inputs()}, None)])
        assert torch.equal(captured.call(Traced("transformer", {"x": other}, None)), module(other))
    (graph,), found = captured.graphs, captured.hooks["transformer"].variant.compilation
    assert (graph.breaks, found.late_frames, found.graph_breaks > 0) == (6, 0, kind != "plain")


def test_breaks_of_compiled_code_have_their_places_in_the_model(module: nn.Module):
    """As of a whole forward, where the stack no longer says which block it is."""
    for module._repeated_blocks in (("Block",), ()):
        captured = arm(module, quick("bcg+compile"))
        with torch.no_grad():
            captured.prepare([Traced("transformer", {"x": inputs()}, None)])
        places = [name.split(" in ")[1].split(":")[0] for name in captured.graphs[0].break_names]
        assert places == [f"layers.{number}.attention (test_compiled.py" for number in range(3)]


def test_a_break_with_several_results_is_taken_apart_outside_of_the_pieces():
    """Inductor's code takes tensors, no tuple of them."""

    @torch.compiler.allow_in_graph
    def halves(x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2)

    def forward(x: Tensor) -> Tensor:
        first, second = halves(x + 1)
        return first * second.cos()

    seen = []

    def compiled(graph: torch.fx.GraphModule, given: list[Tensor]) -> torch.fx.GraphModule:
        seen.append([type(value) for value in given])
        return graph

    def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> Any:
        return between(graph, given, breaks=frozenset([halves]), compile_piece=compiled)

    torch._dynamo.reset()
    x = torch.arange(6.0)
    assert torch.equal(torch.compile(forward, backend=backend, fullgraph=True)(x), (x[:3] + 1) * (x[3:] + 1).cos())
    assert [len(given) for given in seen] == [1, 2]
    assert all(issubclass(kind, Tensor) for given in seen for kind in given)


def test_a_capture_in_which_compiled_code_did_not_run_is_refused(module: nn.Module, monkeypatch: pytest.MonkeyPatch):
    """torch.compile runs eagerly where a guard fails: the arm would measure something else than its name says."""
    monkeypatch.setattr("bcgbench.compiled.unwatched", torch.no_grad)  # leaves the watch in force
    compiled = arm(module, quick("bcg+compile"))
    with torch.no_grad(), pytest.raises(CaptureError, match="6 compiled regions, in the capture"):
        compiled.prepare([Traced("transformer", {"x": inputs()}, None)])


def test_generated_code_replays_from_the_tape(module: nn.Module):
    """Inductor's code is no ATen operation: it is taped whole, between the graph breaks."""
    captured, other = arm(module, RUNNERS["bcg+compile"]), inputs() * 3
    with torch.no_grad():
        captured.prepare([Traced("transformer", {"x": inputs()}, None)])
        replayed = captured.call(Traced("transformer", {"x": other}, None))
        assert torch.equal(replayed, captured.hooks["transformer"].forward({"x": other}))
        assert torch.allclose(replayed, module(other), rtol=1e-4, atol=1e-5)
    assert captured.graphs[0].breaks == 3


class Fused(nn.Linear):
    """Offers a fused form, as diffusers' attentions do."""

    fused_projections = False

    def fuse_qkv_projections(self) -> None:
        self.to_qkv = nn.Linear(8, 24)
        self.fused_projections = True

    def forward(self, x: Tensor) -> Tensor:
        return self.to_qkv(x) if self.fused_projections else super().forward(x)


def test_fused_projections_hold_inside_their_arm_alone():
    """A fused copy of the weights on the shared module would be a changed model to every other arm."""
    module = Fused(8, 8)
    names = set(dict(module.named_parameters()))
    best = BestEager(module, module.forward)
    assert best(inputs()).shape[-1] == 24
    assert module(inputs()).shape[-1] == 8
    assert set(dict(module.named_parameters())) == names
    assert best.settings["fused projections"] == "1 attentions"


def test_changes_are_undone():
    """What an action sets, replaces or nests."""
    module = nn.Sequential(nn.Linear(2, 2))
    old = module[0]
    switches = changes(module, lambda: (setattr(module, "new", 1), module.__setitem__(0, nn.Identity())))
    assert (hasattr(module, "new"), module[0]) == (False, old)
    with switches.on(), switches.on():
        assert (module.new, type(module[0])) == (1, nn.Identity)
    assert (hasattr(module, "new"), module[0]) == (False, old)


@pytest.mark.parametrize("model", ["tiny/z-image", "tiny/qwen-image"])
def test_rivals_of_a_model_are_judged_by_a_wider_dtype(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No compilation in any request (Z-Image's pad masks are patched per call), and an error that is eager's own."""
    torch._dynamo.reset()
    names = ("eager", "eager-best", "compile-cudagraph", "bcg+compile")
    for name in names[2:]:
        monkeypatch.setitem(runners.RUNNERS, name, quick(name))
    buckets = (32,) if "qwen" in model else None
    case = Case(model=model, width_px=32, height_px=32, steps=2, prompts=("A small red cube", "cube"), dtype="float32",
                device="cpu", rounds=1, profile=False, runners=names, buckets=buckets)  # fmt: skip
    records = records_of(case, tmp_path)
    for name in names[1:]:
        record = records[name]
        assert record.status == "OK", record.reasons
        assert (record.fidelity[0].question, record.fidelity[0].exact) == ("arithmetic", True)
        assert record.accuracy.calls == record.fidelity[0].calls > 0
        assert 0 < record.accuracy.error == record.accuracy.eager_error < 1e-5
        assert (record.compilation is None) == (name == "eager-best")
    assert records["eager"].accuracy is None
