"""Faults that `selftest` puts into the tool itself, and the finding in which each must end: one literal row each.

Here: the table. Not here: how a fault is put in (`engine.py`, `inputs.py`, `measured.py`, through `places.py`), running
it (`selftest.py`). Adding a fault is one function and one row. No import of torch, so that the table can be listed
anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Backend = Literal["any", "cuda"]
Shown = Literal["run", "gpu", "runs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is broken, where it can be shown, and what has to find it."""

    part: str
    """What it is put into: "replay", "padding", "settings", ..."""
    breaks: str
    published: tuple[str, ...] = ()
    """Published failures that it stands for, as `owner/repository#number`."""
    backend: Backend = "any"
    """"any": the tape of a CPU shows it, and a GPU too. "cuda": only CUDA graphs can."""
    inject: str
    """`module:function` below this package; the function gives a context manager, and the fault is in while it is
    open."""
    model: str = "tiny/z-image-turbo"
    case: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the case that differ from `selftest.case_of`."""
    shown: Shown = "run"
    """"run": by a run's own verdict. "gpu": the same, its records marked as a GPU's before they are judged, because
    times count there only. "runs": by comparing a run without the fault with one that has it."""
    code: str
    """Reason code that must be among the findings ..."""
    says: str = ""
    """... with these words in its text ..."""
    exit_code: int
    """... and the exit code of the whole."""
    note: str = ""
    """Why several parts may end in one finding, or what the row does not show."""


_SGLANG = "sgl-project/sglang#{}".format
_QWEN = "tiny/qwen-image"
_RECORD = "the times of a tiny run on a CPU, marked as a GPU's"

FAULTS: dict[str, Fault] = {
    # --- replay -------------------------------------------------------------------------------------------------------
    "stale-input": Fault(
        part="replay", breaks="a graph reads what its inputs held at capture",
        published=("deepseek-ai/DeepGEMM#444", "vllm-project/vllm#53915"), inject="engine:stale_input",
        code="outputs-differ", says="calls, first call 1", exit_code=3,
    ),
    "frozen-mask": Fault(
        part="replay", breaks="one input, the prompt's mask, stays as captured", published=("vllm-project/vllm#51994",),
        inject="engine:frozen_mask", model=_QWEN, case={"buckets": (32,)},
        code="outputs-differ", says="calls, first call 1", exit_code=3,
    ),
    "uncloned-output": Fault(
        part="replay", breaks="the next replay overwrites what the one before returned",
        published=(_SGLANG(31852), "pytorch/pytorch#148439", "NVIDIA/TensorRT-LLM#16391"),
        inject="engine:uncloned_output", model=_QWEN, code="outputs-differ", says="8 calls alone exact", exit_code=3,
    ),
    "dropped-bridge": Fault(
        part="replay", breaks="what a break returns does not reach the next segment", published=(_SGLANG(30584),),
        inject="engine:dropped_bridge", code="outputs-differ", says="calls, first call 1", exit_code=3,
    ),
    "wrong-branch": Fault(
        part="replay", breaks="the unconditional branch gets the conditional one's output",
        published=("NVIDIA/TensorRT-LLM#16391",), inject="engine:wrong_branch", model=_QWEN,
        code="outputs-differ", says="4 of 8 calls, first call 1", exit_code=3,
    ),
    "wrong-graph": Fault(
        part="replay", breaks="a signature finds the graph of another", published=("vllm-project/vllm#53915",),
        inject="engine:wrong_graph", model=_QWEN, code="static-input", says="argument leaf", exit_code=7,
    ),
    "baked-constant": Fault(
        part="replay", breaks="a number that the host reads every step keeps its first value",
        published=(_SGLANG(36008), "pytorch/torchtitan#3685"), inject="engine:baked_constant",
        code="outputs-differ", says="calls, first call 1", exit_code=3,
    ),
    "lost-random-advance": Fault(
        part="replay", breaks="every replay draws the same random numbers", published=("pytorch/pytorch#143572",),
        inject="engine:lost_random_advance", case={"dtype": "bfloat16"},
        code="outputs-differ", says="4 calls alone exact, worse than eager", exit_code=3,
    ),
    "changed-weights": Fault(
        part="replay", breaks="a weight is replaced after capture, and the graph goes on with the old one",
        published=(_SGLANG(36008),), inject="inputs:changed_weights", case={"dtype": "bfloat16"},
        code="weights-changed", says="changed while the case ran", exit_code=4,
    ),
    "changed-flag": Fault(
        part="replay", breaks="a switch of the model, which no argument carries, is turned after capture",
        published=(_SGLANG(36008), _SGLANG(34618)), inject="inputs:changed_flag",
        code="eager-changed", says="a switch, weights or a cache", exit_code=4,
    ),
    "nan-output": Fault(
        part="replay", breaks="a replay computes NaN", published=(_SGLANG(37606),), inject="engine:nan_output",
        code="failed", says="NaN", exit_code=7,
    ),
    "raising-replay": Fault(
        part="replay", breaks="an eager call between two segments raises", published=(_SGLANG(34182),),
        inject="engine:raising_replay", code="replay-failed", says="raised at replay", exit_code=7,
    ),
    "wrong-in-a-round": Fault(
        part="replay", breaks="all requests are right, a measured picture is not", published=(_SGLANG(37448),),
        inject="measured:wrong_in_a_round", code="outputs-differ", says="in round 0", exit_code=3,
    ),
    "freed-reference": Fault(
        part="replay", breaks="a graph does not keep alive what it reads, and its memory goes to others",
        published=(_SGLANG(30584), _SGLANG(34183), _SGLANG(37606), "NVIDIA/Megatron-LM#3970"), backend="cuda",
        inject="engine:freed_reference", model="tiny/glm-image", code="outputs-differ", says="calls", exit_code=3,
    ),
    # --- capture ------------------------------------------------------------------------------------------------------
    "failing-capture": Fault(
        part="capture", breaks="the model does what a graph cannot hold", published=(_SGLANG(34929),),
        inject="engine:failing_capture", code="capture-failed", says="indexing with a mask", exit_code=7,
    ),
    "unjoined-stream": Fault(
        part="capture", breaks="work on a side stream is not joined", published=("vllm-project/vllm#57785",),
        backend="cuda", inject="engine:unjoined_stream", code="capture-failed", exit_code=7,
    ),
    "host-read": Fault(
        part="capture", breaks="the model reads a number on the host that changes every step",
        published=(_SGLANG(31852),), inject="engine:host_read", code="fallback", says="host read at", exit_code=4,
    ),
    "late-capture": Fault(
        part="capture", breaks="a graph is captured in the middle of a request", published=(_SGLANG(36485),),
        inject="engine:late_capture", code="late-capture", says="0, 1, 1, 1", exit_code=4,
    ),
    "evicted-graph": Fault(
        part="capture", breaks="the cache drops a graph that requests need", published=("pytorch/pytorch#193402",),
        inject="engine:evicted_graph", model=_QWEN, case={"buckets": (16, 32)},
        code="evicted", says="1 graphs were dropped", exit_code=4,
    ),
    "dead-argument": Fault(
        part="capture", breaks="a call carries 72,000 values that nothing reads", published=(_SGLANG(33989),),
        inject="engine:dead_argument", code="signature", says="'dead' has 72,000 leaves", exit_code=7,
    ),
    # --- engagement ---------------------------------------------------------------------------------------------------
    "eager-in-disguise": Fault(
        part="engagement", breaks="the graph arm runs eagerly", published=(_SGLANG(33885), _SGLANG(30016)),
        inject="engine:eager_in_disguise", code="not-engaged", says="0 of", exit_code=4,
    ),
    "counted-not-done": Fault(
        part="engagement", breaks="the graph arm runs eagerly, and the cache counts replays",
        published=(_SGLANG(31852),), inject="engine:counted_not_done",
        code="captured-not-engaged", says="never replayed", exit_code=4,
    ),
    "replay-recomputed": Fault(
        part="engagement", breaks="the graph arm runs eagerly, and every counter says replayed",
        published=(_SGLANG(30016),), inject="engine:replay_recomputed", shown="gpu",
        code="not-engaged", says="no graph launch", exit_code=4,
        note="the launches are those of the tape's segments, counted in a tiny run and marked as a profiler's",
    ),
    "unhooked": Fault(
        part="engagement", breaks="the pipeline calls another module than the hooked one", published=(_SGLANG(33885),),
        inject="inputs:unhooked", code="not-engaged", says="4 of 14", exit_code=4,
    ),
    "skipped-prompt": Fault(
        part="engagement", breaks="a graph is captured for a prompt that no request of the arm makes",
        published=(_SGLANG(37890),), inject="inputs:skipped_prompt", model=_QWEN, case={"buckets": (12, 32)},
        code="captured-not-engaged", says="did a stage run", exit_code=3,
    ),
    "baseline-replayed": Fault(
        part="engagement", breaks="the eager arm replays", published=(_SGLANG(30016),),
        inject="engine:baseline_replayed", code="baseline-replayed", says="baseline without graphs", exit_code=4,
    ),
    # --- padding ------------------------------------------------------------------------------------------------------
    "forgotten-mask": Fault(
        part="padding", breaks="padded prompt rows are attended to like text", published=(_SGLANG(34218),),
        inject="inputs:forgotten_mask", model=_QWEN, code="padding-over-limit", says="is a mask missing?", exit_code=3,
    ),
    "wrong-bucket": Fault(
        part="padding", breaks="captions are padded beyond the multiple of 32 that the model rounds to",
        published=(_SGLANG(34218),), inject="inputs:wrong_bucket",
        code="padding-over-limit", says="padding changes call", exit_code=3,
    ),
    "cut-prompt": Fault(
        part="padding", breaks="a prompt longer than its bucket loses its end", published=(_SGLANG(31852),),
        inject="inputs:cut_prompt", model=_QWEN, case={"buckets": (8, 32)},
        code="padding-over-limit", says="padding changes call", exit_code=3,
    ),
    "stale-padding": Fault(
        part="padding", breaks="the first prompt's padded rows are taken for the second",
        published=("vllm-project/vllm#51994",), inject="inputs:stale_padding",
        code="padding-over-limit", says="padding changes call", exit_code=3,
    ),
    # --- settings -----------------------------------------------------------------------------------------------------
    "other-guidance": Fault(
        part="settings", breaks="one arm denoises with another guidance scale", published=(_SGLANG(30584),),
        inject="inputs:other_guidance", model=_QWEN, code="outputs-differ", says="8 calls alone exact", exit_code=3,
        note="a run has one guidance scale, which every arm's record repeats; an arm that uses another shows by its "
        "pictures, as an overwritten output does",
    ),
    "other-steps": Fault(
        part="settings", breaks="one arm takes more denoise steps", published=(_SGLANG(30584),),
        inject="inputs:other_steps", code="not-engaged", says="transformer calls were replayed", exit_code=3,
    ),
    "other-precision": Fault(
        part="settings", breaks="one arm runs under autocast", published=(_SGLANG(36008),),
        inject="inputs:other_precision", code="fallback", says="autocast", exit_code=3,
    ),
    "unlike-steps": Fault(
        part="settings", breaks="the second of two runs takes more steps", published=(_SGLANG(30584),),
        inject="inputs:unlike_steps", shown="runs", code="not-comparable", says="case.steps", exit_code=4,
    ),
    "unlike-switch": Fault(
        part="settings", breaks="the second of two runs multiplies matrices at another precision",
        published=(_SGLANG(30584),), inject="inputs:unlike_switch", shown="runs",
        code="not-comparable", says="environment.settings", exit_code=4,
    ),
    "unlike-prior": Fault(
        part="settings", breaks="the second of two runs draws other noise", published=(_SGLANG(27436),),
        inject="inputs:unlike_prior", shown="runs", code="different-prior", says="got the prior", exit_code=4,
    ),
    "unseeded-noise": Fault(
        part="settings", breaks="every request begins from noise of its own", published=(_SGLANG(27436),),
        inject="inputs:unseeded_noise", code="requests-unlike", says="not the same for every request", exit_code=4,
    ),
    "broken-weights": Fault(
        part="settings", breaks="weights are wrong in every arm, so that the arms agree", published=(_SGLANG(30584),),
        inject="inputs:broken_weights", shown="runs",
        code="outputs-differ", says="different outputs from one prior", exit_code=3,
    ),
    # --- clocks -------------------------------------------------------------------------------------------------------
    "timer-stopped-early": Fault(
        part="clock", breaks="the device's timer is read after the first step", published=(_SGLANG(16219),),
        inject="measured:timer_stopped_early", case={"steps": 8}, shown="gpu", note=_RECORD,
        code="timer-mismatch", says="one of them stopped too early", exit_code=4,
    ),
    "no-event-time": Fault(
        part="clock", breaks="only the host's clock was read", published=(_SGLANG(16219),),
        inject="measured:no_event_time", shown="gpu", note=_RECORD,
        code="timer-mismatch", says="no CUDA-event time", exit_code=4,
    ),
    "standing-clock": Fault(
        part="clock", breaks="neither clock moves while the transformer runs", published=(_SGLANG(16219),),
        inject="measured:standing_clock", shown="gpu", note=_RECORD,
        code="impossible-time", says="above 0", exit_code=4,
    ),
    "lost-stage": Fault(
        part="clock", breaks="decoding is billed to no stage", published=(_SGLANG(16219),),
        inject="measured:lost_stage", model=_QWEN, shown="gpu", note=_RECORD,
        code="stages-do-not-add-up", says="before + denoise + after", exit_code=4,
    ),
    "moved-time": Fault(
        part="clock", breaks="one arm's denoise time counts as decoding", published=(_SGLANG(27436),),
        inject="measured:moved_time", case={"steps": 16}, shown="gpu", note=_RECORD,
        code="time-moved", says="billed to another stage", exit_code=4,
    ),
    "below-compute-floor": Fault(
        part="clock", breaks="a denoise takes less time than its FLOPs", published=(_SGLANG(27436),),
        inject="measured:published_times", case={"dtype": "bfloat16"}, shown="gpu",
        note="a tiny run with the times that were published for Z-Image-Turbo on a B200 and the FLOPs of that denoise",
        code="below-compute-floor", says="0.026 s is impossible", exit_code=4,
    ),
    # --- metrics and outputs ------------------------------------------------------------------------------------------
    "wrapped-psnr": Fault(
        part="metric", breaks="pixels are 16 levels off and the metric squares bytes, where 16 * 16 is 0",
        inject="measured:wrapped_psnr", code="outputs-differ", says="no finite PSNR in image", exit_code=3,
    ),
    "resized-image": Fault(
        part="output", breaks="one arm's picture was made at half the size and scaled up", published=(_SGLANG(34218),),
        inject="measured:resized_image", code="outputs-differ", says="in image 0; each of 4 calls alone exact", exit_code=3,
    ),
    "other-size": Fault(
        part="output", breaks="one arm's picture has half the size", inject="measured:other_size",
        code="failed", says="16x16 pixels, asked were 32x32", exit_code=7,
    ),
    "other-sound": Fault(
        part="output", breaks="frames are right, the sound is not", inject="measured:other_sound", model="tiny/ltx-2",
        code="outputs-differ", says="in audio", exit_code=3,
    ),
    "one-wrong-frame": Fault(
        part="output", breaks="one pixel of one frame of a video is one level off", inject="measured:one_wrong_frame",
        model="tiny/sana-video", code="outputs-differ", says="max difference 1,", exit_code=3,
    ),
}  # fmt: skip
