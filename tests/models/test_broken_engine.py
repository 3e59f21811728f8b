"""Would the checks see a broken engine? Each fault is put into the engine on purpose and must be found.

The check is the bench's own: every denoiser call on identical inputs, whole requests, padded against native length and
the count of replays, on the tiny Qwen-Image. The unbroken engine passes it, so the check is not one that always fails.
A break output freed too early is a fault of GPU memory and stands in `tests/gpu`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcgbench.answers import CallTally
from bcgbench.arms import Arm, Traced, Tracer
from bcgbench.engine import graph
from bcgbench.engine.buffers import StaticInputs
from bcgbench.engine.cache import GraphCache
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graph import Break
from bcgbench.engine.segments import Bridge
from bcgbench.engine.tape import TapeSegment
from bcgbench.errors import CaptureError, EngineError
from bcgbench.models import base
from bcgbench.models.qwen_image import MASK, QwenImage
from bcgbench.runners import RUNNERS
from tests.factories import case

PROMPTS = (
    "A small red cube on a white table",
    "A detailed cinematic scene of a glass observatory above a quiet lake at sunrise, with soft mist, warm light",
)
ROUNDING = 1e-5
"""What padding may change in float32 on the tiny model: 1e-6 when right, 0.7 when the mask is forgotten."""


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def session() -> base.Session:
    """The tiny Qwen-Image with a short and a long prompt, which fall into two buckets."""
    return base.load(replace(case(model="tiny/qwen-image", dtype="float32"), width_px=32, height_px=32, steps=2,
                             guidance=4.0, device="cpu", prompts=PROMPTS))  # fmt: skip


@pytest.fixture(scope="module")
def traced(session: base.Session) -> list[Traced]:
    """Every denoiser call of both prompts."""
    tracer = Tracer(Arm(RUNNERS["eager"], session))
    with torch.no_grad(), tracer.recording():
        for prompt in range(len(PROMPTS)):
            session.pipe(**session.request(prompt) | {"output_type": "latent"})
    return tracer.calls


def latents(arm: Arm, session: base.Session) -> list[Tensor]:
    """Prompt 0, prompt 1, and prompt 0 again, which shows what the second left behind."""
    with arm.attached():
        return [session.pipe(**session.request(prompt) | {"output_type": "latent"}).images for prompt in (0, 1, 0)]


def tally(calls: list[Traced], reference: Callable[[Traced], Any], arm: Arm) -> CallTally:
    """The arm against the reference on identical inputs."""
    found = CallTally()
    for call in calls:
        found.add(reference(call), arm.call(call))
    return found


def findings(session: base.Session, traced: list[Traced]) -> set[str]:
    """What the checks find wrong with the `bcg` arm."""
    padded, arm = Arm(RUNNERS["eager-padded"], session), Arm(RUNNERS["bcg"], session)
    try:
        arm.prepare(traced)
    except CaptureError:
        return {"capture refused"}
    found = set()
    try:
        calls = tally(traced, padded.call, arm)
        finals = latents(arm, session)
    except EngineError as error:
        return {type(error).__name__}
    if calls.exact < calls.calls:
        found.add("calls differ")
    if not all(map(bit_equal, latents(padded, session), finals)):
        found.add("latents differ")
    if arm.counts.replays < arm.counts.forwards:
        found.add("not engaged")
    padding = tally(traced, lambda call: call.output, padded)
    if padding.worst is not None and padding.worst.max_abs > ROUNDING:
        found.add("padding changes the prediction")
    return found


def test_the_unbroken_engine_passes(session: base.Session, traced: list[Traced]):
    """Both prompts, guidance on: eight calls in two buckets, all exact, all replayed."""
    assert len(traced) == 8
    assert findings(session, traced) == set()


def stale_input(patch: pytest.MonkeyPatch) -> None:
    """Inputs are copied at capture and never again."""
    update = StaticInputs.update
    patch.setattr(StaticInputs, "update", lambda self, leaves: None if self._seen else update(self, leaves))


def stale_timestep(patch: pytest.MonkeyPatch) -> None:
    """Only the smallest input is stale: a step computed for another time."""
    update = StaticInputs.update

    def forgetful(self: StaticInputs, leaves: list[Any]) -> None:
        if self._seen:
            smallest = min(self._buffers, key=lambda index: self._buffers[index].numel())
            leaves = [self.leaves[i] if i == smallest else leaf for i, leaf in enumerate(leaves)]
        update(self, leaves)

    patch.setattr(StaticInputs, "update", forgetful)


def output_not_cloned(patch: pytest.MonkeyPatch) -> None:
    """The caller holds the graph's own memory: guidance reads its first prediction after the second was made."""
    broken = types.SimpleNamespace(**vars(graph.trees))
    broken.clone = lambda tree: tree
    patch.setattr(graph, "trees", broken)


def bridge_copy_dropped(patch: pytest.MonkeyPatch) -> None:
    """The next segment reads the captured attention output."""
    patch.setattr(Bridge, "fill", lambda _self, _result: None)


def break_skipped(patch: pytest.MonkeyPatch) -> None:
    """Attention is not run again."""
    patch.setattr(Break, "replay", lambda _self: None)


def segment_skipped(patch: pytest.MonkeyPatch) -> None:
    """The last segment is not replayed."""
    replay = graph.SegmentedGraph.replay

    def short(self: graph.SegmentedGraph, leaves: list[Any]) -> Any:
        steps, self.steps = self.steps, self.steps[:-1]
        try:
            return replay(self, leaves)
        finally:
            self.steps = steps

    patch.setattr(graph.SegmentedGraph, "replay", short)


def operation_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """Additions run while capturing and never again."""
    record = TapeSegment.record

    def forgetful(self: TapeSegment, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func._schema.name != "aten::add":
            record(self, func, args, kwargs, out)

    patch.setattr(TapeSegment, "record", forgetful)


def captured_bit_flipped(patch: pytest.MonkeyPatch) -> None:
    """A segment's last result is off by one bit when it closes."""
    end = TapeSegment.end

    def end_wrong(self: TapeSegment) -> None:
        end(self)
        for *_, fresh in self._operations[-1:]:
            for tensor in fresh:
                tensor.mul_(1 + 2**-23)

    patch.setattr(TapeSegment, "end", end_wrong)


def wrong_graph(patch: pytest.MonkeyPatch) -> None:
    """Any graph serves any call."""
    patch.setattr(GraphCache, "find", lambda self, _signature: next(reversed(self._graphs.values()), [])
                  if self.frozen else [])  # fmt: skip


def graph_never_found(patch: pytest.MonkeyPatch) -> None:
    """A call never finds its graph and silently runs eagerly."""
    patch.setattr(GraphCache, "find", lambda _self, _signature: [])


def mask_dropped(patch: pytest.MonkeyPatch) -> None:
    """Embeddings are padded and no mask is given."""
    shaped = QwenImage._shaped
    patch.setattr(QwenImage, "_shaped", lambda self, arguments, **rest: shaped(self, arguments, **rest) | {MASK: None})


def mask_of_ones(patch: pytest.MonkeyPatch) -> None:
    """A mask is given and lets every pad row through."""

    def all_ones(self: QwenImage, arguments: dict[str, Any], **rest: Any) -> dict[str, Any]:
        made = shaped(self, arguments, **rest)
        mask: Tensor = made[MASK]
        return made | {MASK: torch.ones_like(mask)}

    shaped = QwenImage._shaped
    patch.setattr(QwenImage, "_shaped", all_ones)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (stale_input, {"calls differ", "latents differ"}),
        (stale_timestep, {"calls differ", "latents differ"}),
        (output_not_cloned, {"latents differ"}),
        (bridge_copy_dropped, {"calls differ", "latents differ"}),
        (break_skipped, {"calls differ", "latents differ"}),
        (segment_skipped, {"calls differ", "latents differ"}),
        (operation_not_recorded, {"calls differ", "latents differ"}),
        (captured_bit_flipped, {"capture refused"}),
        (wrong_graph, {"StaticInputError"}),
        (graph_never_found, {"not engaged"}),
        (mask_dropped, {"padding changes the prediction"}),
        (mask_of_ones, {"padding changes the prediction"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_engine_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], found: set[str], session: base.Session, traced: list[Traced],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """Each fault by the check that is there for it."""
    fault(monkeypatch)
    assert findings(session, traced) == found
