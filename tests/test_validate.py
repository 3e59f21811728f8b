"""`validate`: clean on tiny models, and each check fails, by its own reason, under the fault that it provokes."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bcgbench import bench, validate, validate_audit, validate_inputs, validate_repeat
from bcgbench.engine import signature, trees
from bcgbench.engine.buffers import StaticInputs
from bcgbench.engine.cache import GraphCache
from bcgbench.engine.capture import _Passes
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.steps import Break
from bcgbench.engine.tape import TapeBackend, TapeSegment
from bcgbench.faults import injected
from bcgbench.models.prior import Prior
from bcgbench.types import Case
from bcgbench.validate_subject import Subject, Trace, opened

PROMPTS = ("A small red cube on a white table", "cube " * 40)
SIZES = {"tiny/qwen-image": (32, None), "tiny/z-image": (32, None), "tiny/ltx-2": (64, 5)}


def case_of(model: str = "tiny/qwen-image") -> Case:
    """A case of one model at its least size."""
    side, frames = SIZES[model]
    return Case(model=model, width_px=side, height_px=side, frames=frames, steps=2, prompts=PROMPTS, dtype="float32",
                device="cpu", rounds=1, profile=False, runners=("bcg",))  # fmt: skip


class Traces(dict[str, Trace]):
    """Traces by model."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, model: str) -> Trace:
        self[model] = self._stack.enter_context(opened(case_of(model)))
        return self[model]


@pytest.fixture(scope="module")
def traces() -> Iterator[Traces]:
    """Each model loaded and traced once, when it is first asked for."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        yield Traces(stack)


@pytest.fixture
def qwen(traces: Traces) -> Iterator[Subject]:
    """Qwen-Image: two prompt lengths, breaks, a mask."""
    with torch.no_grad():
        yield Subject(traces["tiny/qwen-image"], "bcg")


def ask(name: str, subject: Subject) -> validate.Finding:
    """One check."""
    return validate._run(name, subject)


def failed(name: str, subject: Subject, *phrases: str) -> None:
    """The check fails, and says all of the phrases."""
    found = ask(name, subject)
    text = " | ".join((found.reason, *found.details))
    assert found.ruling == "FAILED", text
    assert all(phrase in text for phrase in phrases), text


@pytest.mark.parametrize("model", SIZES)
def test_a_sound_engine_passes_every_check(model: str, traces: Traces):
    """No false alarm; what cannot be asked on a CPU, or without a golden run, says so. The cost is counted."""
    subject = Subject(traces[model], "bcg")
    with torch.no_grad():
        found = [ask(name, subject) for name in validate.CHECKS if name != "fresh-process"]
    assert [(each.check, each.reason) for each in found if each.ruling == "FAILED"] == []
    skipped = {each.check for each in found if each.ruling == "NOT-APPLICABLE"}
    assert skipped <= {"golden", "memory-pressure", "padding", "eviction"}
    assert all(each.forwards > 0 for each in found if each.ruling == "OK")
    assert validate.exit_code(found) == 0


# --- the reference and the proof ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("modes", "kind"), [(2, "multimodal"), (10**9, "noisy")])
def test_an_eager_forward_that_is_not_repeatable_gets_its_class(modes: int, kind: str, traces: Traces):
    """https://github.com/sgl-project/sglang/pull/27436: two eager images differed, so equality said nothing."""
    trace, calls = traces["tiny/qwen-image"], iter(range(10**9))
    with _output_changed(trace, lambda x: x + 0.01 * (next(calls) % modes)), torch.no_grad():
        subject = Subject(trace, "bcg")
        failed("repeatability", subject, f"eager is {kind}", "differ by up to 0.0")


@contextlib.contextmanager
def _output_changed(trace: Trace, change: Any) -> Iterator[None]:
    """Every forward's output changed by a function."""
    module = trace.session.denoisers["transformer"]
    counted = vars(module)["forward"]
    module.forward = lambda *args, **kwargs: trees.map_leaves(change, counted(*args, **kwargs))
    module.forward.__signature__ = inspect.signature(counted)
    try:
        yield
    finally:
        module.forward = counted


def test_another_result_in_a_fresh_process_is_told(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """The process of its own is a stand-in here; the real one is started by the command line's test."""
    there = [list(validate_repeat.digests(traced.output)) for traced in qwen.trace.calls[0]]

    class Done:
        returncode, stderr = 0, ""
        stdout = validate_repeat.json.dumps(there)

    monkeypatch.setattr(validate_repeat.subprocess, "run", lambda *_, **__: Done)
    assert ask("fresh-process", qwen).ruling == "OK"
    there[2] = ["other"]
    Done.stdout = validate_repeat.json.dumps(there)
    failed("fresh-process", qwen, "multimodal across processes: 1 of 4 calls differ", "first call 2")
    outcomes = iter(range(10))
    monkeypatch.setattr(validate_repeat, "_fresh", lambda _: [*there[:3], [f"never {next(outcomes)} again"]])
    failed("fresh-process", qwen, "noisy across processes: 2 of 4 calls differ")


def test_eager_in_disguise_is_not_engagement(qwen: Subject):
    """https://github.com/sgl-project/sglang/pull/33885: the flag was on and every request ran eagerly."""
    with injected("eager-in-disguise"):
        failed("engagement", qwen, "0 of 12 transformer calls were replayed")


@pytest.mark.parametrize("fault", ["forgotten-mask", "dropped-mask"])
def test_padding_that_is_attended_fails_in_float32(fault: str, traces: Traces):
    """https://github.com/sgl-project/sglang/pull/34218: the picture drifted by tokens that padding added."""
    with torch.no_grad(), injected(fault):
        failed("padding", Subject(traces["tiny/qwen-image"], "bcg"), "is a mask missing?")


# --- inputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["hidden_states", "encoder_hidden_states_mask"])
def test_a_frozen_input_is_named(argument: str, qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """https://github.com/vllm-project/vllm/pull/51994: a mask kept the value of the warm-up."""
    path = list(trees.paths(qwen.shapes[0].signature.spec)).index(argument)
    update = StaticInputs.update
    first: list[Tensor] = []

    def frozen(self: StaticInputs, leaves: list[Any]) -> None:
        if self not in first:
            first.append(self)  # type: ignore[arg-type]
            return update(self, leaves)
        return update(self, [*leaves[:path], self.leaves[path], *leaves[path + 1 :]])

    monkeypatch.setattr(StaticInputs, "update", frozen)
    failed("inputs", qwen, f"{argument}: frozen input")


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (torch.tensor([1.0, 2.0]), [1.375, 2.625]),
        (torch.tensor([[True, True, False]]), [[True, False, False]]),
        (torch.tensor([[1, 1, 1]]), [[1, 1, 0]]),
        (torch.tensor([3, 5, 7]), [7, 5, 3]),
        (torch.tensor([4, 4]), [3, 3]),
    ],
)
def test_a_mutated_argument_stays_legal(leaf: Tensor, expected: list[Any]):
    """Masks keep an entry, positions and ids keep their values, a length shrinks."""
    found = validate_inputs.mutated(leaf)
    assert found is not None
    assert found.tolist() == expected


@pytest.mark.parametrize("leaf", [torch.tensor([1, 0]), torch.tensor(0), torch.zeros(2, dtype=torch.int64)])
def test_an_argument_without_another_legal_value_is_left(leaf: Tensor):
    """A mask of one entry must not become empty."""
    assert validate_inputs.mutated(leaf) is None


# --- lifetime -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["dropped-bridge", "skipped-break", "skipped-segment"])
def test_what_a_replay_leaves_out_is_found_by_its_poison(fault: str, qwen: Subject):
    """On identical inputs the old output would pass for the new one."""
    with injected(fault):
        failed("order", qwen, "in order (0, 1)", "differs from eager")


def test_an_uncloned_output_is_overwritten_by_the_next_call(qwen: Subject):
    """https://github.com/NVIDIA/TensorRT-LLM/pull/16391: both branches of guidance got one buffer."""
    with injected("uncloned-output"):
        failed("aliasing", qwen, "changed when transformer was called next")


def test_a_lost_output_type_is_told(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """A model output that comes back as a plain list breaks code that asks for its attributes."""
    replay = SegmentedGraph.replay
    monkeypatch.setattr(SegmentedGraph, "replay", lambda self, leaves: list(trees.tensors(replay(self, leaves))))
    failed("aliasing", qwen, "returned [", "where eager returns")


def test_an_eviction_that_breaks_another_graph_is_found(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """https://github.com/pytorch/pytorch/issues/193402: destroying one graph cleared a workspace of another."""
    held: list[TapeSegment] = []
    begin = TapeSegment.begin
    trim = GraphCache.trim

    def noted(self: TapeSegment) -> None:
        held.append(self)
        begin(self)

    def breaking(self: GraphCache) -> None:
        trim(self)
        if self.evictions:
            for segment in held:
                segment._operations[:] = []

    monkeypatch.setattr(TapeSegment, "begin", noted)
    monkeypatch.setattr(GraphCache, "trim", breaking)
    failed("eviction", qwen, "after an eviction")


# --- faults ---------------------------------------------------------------------------------------------------------


def test_a_failed_capture_that_moves_the_generator_is_found(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """https://github.com/pytorch/pytorch/issues/180395: cleaning up only after success."""
    monkeypatch.setattr(TapeBackend, "rewind", lambda _: torch.rand(1))
    failed("capture-failure", qwen, "the random generator is elsewhere")


def test_a_failed_capture_that_leaks_is_found(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """What a failed capture keeps alive is memory lost for the process."""
    kept: list[Tensor] = []
    monkeypatch.setattr(TapeBackend, "recover", lambda _: kept.append(torch.zeros(1)))
    failed("capture-failure", qwen, "memory leaked: 1 tensors")


def test_a_swallowed_capture_error_is_found(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """A capture that goes on after an error holds half a forward."""
    record = _Passes._record

    def swallowing(self: _Passes, recorder: Any) -> Any:
        with contextlib.suppress(Exception):
            return record(self, recorder)
        qwen.trace.after_forward = None
        recorder.steps.clear()
        return record(self, recorder)

    monkeypatch.setattr(_Passes, "_record", swallowing)
    failed("capture-failure", qwen, "the capture succeeded, so the error was swallowed")


# --- switches and weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["graph", "bcg"])
def test_a_switch_that_is_not_in_the_key_is_a_stale_replay(
    runner: str, traces: Traces, monkeypatch: pytest.MonkeyPatch
):
    """https://github.com/sgl-project/sglang/issues/36008: a runtime switch did not reach the captured graph."""
    ambient = signature.ambient
    without = {"autocast", "inference mode"}
    monkeypatch.setattr(
        "bcgbench.engine.graphed.ambient",
        lambda module, device_type: tuple(
            None if name in without else value
            for name, value in zip(signature.AMBIENT, ambient(module, device_type), strict=True)
        ),
    )
    with torch.no_grad():
        failed("toggles", Subject(traces["tiny/qwen-image"], runner), "autocast", "(a stale replay)")


def test_a_switch_turned_back_must_find_its_graph_again(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """Calls that only miss equal eager, and would hide a stale replay under the switches that follow."""
    ambient, turned = signature.ambient, []

    def remembering(module: Any, device_type: str) -> tuple[Any, ...]:
        turned.extend([True] * (torch.get_float32_matmul_precision() == "medium"))
        return (*ambient(module, device_type), bool(turned))

    monkeypatch.setattr("bcgbench.engine.graphed.ambient", remembering)
    with torch.no_grad():
        failed("toggles", qwen, "float32 matmul precision, turned back: its graph is not found any more")


def test_constants_that_python_calls_equal_must_not_collide(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """True, 1 and 1.0 hash equal: a key by value alone replays the graph of another type."""
    monkeypatch.setattr(signature, "constant_key", lambda leaf: (object, leaf))
    failed("toggles", qwen, "finds the graph of")


def test_replaced_weights_that_nobody_looks_for_are_stale(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """A merged adapter may give a layer new storage; a graph goes on reading the old."""
    monkeypatch.setattr(GraphedForward, "check_weights", lambda _: None)
    failed("weights", qwen, "proj_out with new storage", "proj_out behind an adapter", "proj_out in training mode",
           "(a stale replay)")  # fmt: skip


def test_replaced_weights_drop_the_graphs_and_a_miss_says_so(qwen: Subject):
    """Weights are looked at once per request; values written in place stay with the graphs."""
    arm, shape = qwen.arm(), qwen.shapes[0]
    layer = qwen.hook(arm, shape).module.proj_out
    graphed = qwen.hook(arm, shape).graphed
    old = layer.weight
    layer.weight.mul_(1.0)
    with arm.attached():
        graphed(shape.arguments)
    assert graphed.replays == 1
    try:
        layer.weight = nn.Parameter(old.clone(), requires_grad=False)
        with arm.attached():
            graphed(shape.arguments)
    finally:
        layer.weight = old
    assert (graphed.replays, graphed.fallbacks) == (1, 1)
    (miss,) = graphed.cache.misses.values()
    assert miss.reason == "weights or switches changed after the capture (proj_out.weight); capture again"


# --- from inside ----------------------------------------------------------------------------------------------------


def test_a_replay_that_reads_more_than_eager_is_told_with_its_place(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """https://github.com/sgl-project/sglang/pull/31852: the bucket's mask brought a device read into every forward."""
    replay = SegmentedGraph.replay

    def reading(self: SegmentedGraph, leaves: list[Any]) -> Any:
        assert leaves[0].sum().item() != 1e9
        return replay(self, leaves)

    monkeypatch.setattr(SegmentedGraph, "replay", reading)
    failed("host-audit", qwen, "asks the host 1 times, eager 0", "host read: item", "test_validate.py")


def test_compilation_after_preparation_is_told_with_its_place(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """A kernel that is compiled in the first measured request is billed to it."""
    replay = SegmentedGraph.replay
    function = torch.compile(lambda x: x * 1, backend="eager")

    def compiling(self: SegmentedGraph, leaves: list[Any]) -> Any:
        function(leaves[0])
        return replay(self, leaves)

    monkeypatch.setattr(SegmentedGraph, "replay", compiling)
    failed("host-audit", qwen, "a replay of transformer after preparation: 1x compilation: torch.compile (dynamo) in")


def test_a_step_that_raises_is_named_with_its_neighbours(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """https://github.com/sgl-project/sglang/issues/34183: an illegal access somewhere in 61 segments."""
    replay = TapeSegment.replay

    def raising(self: TapeSegment) -> None:
        if len(self._operations) > 0 and steps.index(self) == 2:
            raise RuntimeError("illegal access")
        replay(self)

    arm = qwen.arm()
    steps = qwen.graph(arm, qwen.shapes[0]).steps
    monkeypatch.setattr(qwen, "arm", lambda: arm)
    monkeypatch.setattr(TapeSegment, "replay", raising)
    failed("steps", qwen, "RuntimeError in step 3 of 5", "the segment between", "transformer_blocks.0.attn")


def test_a_step_that_hangs_is_named(qwen: Subject, monkeypatch: pytest.MonkeyPatch):
    """A hang must end in a finding, and nothing more is asked of the device."""
    monkeypatch.setattr(validate_audit, "STEP_LIMIT_S", 0.2)
    monkeypatch.setattr(Break, "replay", lambda _: time.sleep(1.0))
    failed("steps", qwen, "no end after 0.2 s of step 2 of 5, the break")
    assert not qwen.alive


# --- an earlier run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored run of the case."""
    from bcgbench import cli_run

    results = tmp_path_factory.mktemp("results")
    with cli_run.start([case_of()], results=results, command="", suite=None) as run:

        def emit(event: object) -> None:
            if type(event).__name__ == "Record":
                run.append_record(event)  # type: ignore[arg-type]

        bench.run_case(case_of(), run_id=run.info.run_id, run_path=run.path, attempt=1, emit=emit,
                       should_stop=lambda: False)  # fmt: skip
    return run.path


def test_golden_outputs_are_compared_by_digest(earlier: Path, traces: Traces):
    """https://github.com/sgl-project/sglang/pull/30584: both modes were wrong, and equal."""
    trace = traces["tiny/qwen-image"]
    trace.golden = earlier
    try:
        with torch.no_grad():
            found = ask("golden", Subject(trace, "bcg"))
            assert (found.ruling, found.reason[:12]) == ("OK", "same outputs"), found.reason
            layer = trace.session.denoisers["transformer"].proj_out
            layer.weight.mul_(1.5)
            failed("golden", Subject(trace, "bcg"), "different outputs from one prior")
            layer.weight.div_(1.5)
    finally:
        trace.golden = None


def test_golden_outputs_of_another_prior_are_not_judged(earlier: Path, traces: Traces, monkeypatch: pytest.MonkeyPatch):
    """Other noise gives other pictures, which says nothing."""
    trace = traces["tiny/qwen-image"]
    settings = Prior.settings.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Prior, "settings", property(lambda self: {**settings(self), "prior": "other"}))
    monkeypatch.setattr(trace, "golden", earlier)
    with torch.no_grad():
        found = ask("golden", Subject(trace, "bcg"))
    assert (found.ruling, found.reason[:13]) == ("NOT-APPLICABLE", "another prior")


# --- the frame around the checks ------------------------------------------------------------------------------------


def test_once_cuda_is_lost_no_other_check_runs(monkeypatch: pytest.MonkeyPatch):
    """What a lost device says about another check is nothing."""
    monkeypatch.setattr(validate_audit, "STEP_LIMIT_S", 0.2)
    monkeypatch.setattr(Break, "replay", lambda _: time.sleep(1.0))
    found = list(validate.run_checks(case_of(), runners=["bcg", "bcg"], names=["steps"]))
    assert [each.ruling for each in found] == ["FAILED", "NOT-APPLICABLE"]
    assert validate.exit_code(found) == 4


def test_exit_code_is_the_worst_of_the_failed_checks():
    """Wrong outputs outrank unproven graphs; nothing asked is no success."""
    finding = validate.skipped("order", "bcg", "")
    graphs = replace(finding, check="steps", ruling="FAILED")
    assert validate.exit_code([finding]) == 6
    assert validate.exit_code([finding, graphs]) == 4
    assert validate.exit_code([graphs, replace(finding, ruling="FAILED")]) == 3
    assert validate.exit_code([replace(finding, ruling="OK"), finding]) == 0
