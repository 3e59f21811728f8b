"""Faults of padding, settings, clocks, metrics and outputs. Literal rows only."""

from __future__ import annotations

from bcgbench.faults.fault import Fault

_SGLANG = "sgl-project/sglang#{}".format
_QWEN = "tiny/qwen-image"
_RECORD = "the times of a tiny run on a CPU, marked as a GPU's"

FAULTS: dict[str, Fault] = {
    # --- padding ------------------------------------------------------------------------------------------------------
    "forgotten-mask": Fault(
        part="padding", breaks="padded prompt rows are attended to like text", published=(_SGLANG(34218),),
        inject="inputs:forgotten_mask", model=_QWEN, code="padding-over-limit", says="is a mask missing?", exit_code=3,
    ),
    "dropped-mask": Fault(
        part="padding", breaks="prompt rows are padded and no mask is given", published=(_SGLANG(34218),),
        inject="inputs:dropped_mask", model=_QWEN, code="padding-over-limit", says="is a mask missing?", exit_code=3,
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
        backend="none",
        inject="inputs:unlike_steps", shown="runs", code="not-comparable", says="case.steps", exit_code=4,
    ),
    "unlike-switch": Fault(
        part="settings", breaks="the second of two runs multiplies matrices at another precision",
        published=(_SGLANG(30584),), backend="none", inject="inputs:unlike_switch", shown="runs",
        code="not-comparable", says="environment.settings", exit_code=4,
    ),
    "unlike-prior": Fault(
        part="settings", breaks="the second of two runs draws other noise", published=(_SGLANG(27436),),
        backend="none",
        inject="inputs:unlike_prior", shown="runs", code="different-prior", says="got the prior", exit_code=4,
    ),
    "unseeded-noise": Fault(
        part="settings", breaks="every request begins from noise of its own", published=(_SGLANG(27436),),
        backend="none",
        inject="inputs:unseeded_noise", code="requests-unlike", says="not the same for every request", exit_code=4,
    ),
    "broken-weights": Fault(
        part="settings", breaks="weights are wrong in every arm, so that the arms agree", published=(_SGLANG(30584),),
        backend="none", inject="inputs:broken_weights", shown="runs",
        code="outputs-differ", says="different outputs from one prior", exit_code=3,
    ),
    # --- clocks -------------------------------------------------------------------------------------------------------
    "timer-stopped-early": Fault(
        part="clock", breaks="the device's timer is read after the first step", published=(_SGLANG(16219),),
        backend="none", inject="measured:timer_stopped_early", case={"steps": 8}, shown="gpu", note=_RECORD,
        code="timer-mismatch", says="one of them stopped too early", exit_code=4,
    ),
    "no-event-time": Fault(
        part="clock", breaks="only the host's clock was read", published=(_SGLANG(16219),),
        backend="none", inject="measured:no_event_time", shown="gpu", note=_RECORD,
        code="timer-mismatch", says="no CUDA-event time", exit_code=4,
    ),
    "standing-clock": Fault(
        part="clock", breaks="neither clock moves while the transformer runs", published=(_SGLANG(16219),),
        backend="none", inject="measured:standing_clock", shown="gpu", note=_RECORD,
        code="impossible-time", says="above 0", exit_code=4,
    ),
    "lost-stage": Fault(
        part="clock", breaks="decoding is billed to no stage", published=(_SGLANG(16219),),
        backend="none", inject="measured:lost_stage", model=_QWEN, shown="gpu", note=_RECORD,
        code="stages-do-not-add-up", says="before + denoise + after", exit_code=4,
    ),
    "moved-time": Fault(
        part="clock", breaks="one arm's denoise time counts as decoding", published=(_SGLANG(27436),),
        backend="none", inject="measured:moved_time", case={"steps": 16}, shown="gpu", note=_RECORD,
        code="time-moved", says="billed to another stage", exit_code=4,
    ),
    "below-compute-floor": Fault(
        part="clock", breaks="a denoise takes less time than its FLOPs", published=(_SGLANG(27436),),
        backend="none", inject="measured:published_times", case={"dtype": "bfloat16"}, shown="gpu",
        note="a tiny run with the times that were published for Z-Image-Turbo on a B200 and the FLOPs of that denoise",
        code="below-compute-floor", says="0.026 s is impossible", exit_code=4,
    ),
    "slower-for-memory": Fault(
        part="cost", breaks="the graph arm takes twice the time and 4 GB more", backend="none",
        published=(_SGLANG(36470), _SGLANG(38533), "unslothai/unsloth#11175"), inject="measured:slower_for_memory",
        case={"rounds": 6}, shown="gpu", note=_RECORD, code="no-gain", says="4.0 GB above", exit_code=1,
    ),
    # --- metrics and outputs ------------------------------------------------------------------------------------------
    "wrapped-psnr": Fault(
        part="metric", breaks="pixels are 16 levels off and the metric squares bytes, where 16 * 16 is 0",
        backend="none",
        inject="measured:wrapped_psnr", code="outputs-differ", says="no finite PSNR in image", exit_code=3,
    ),
    "resized-image": Fault(
        part="output", breaks="one arm's picture was made at half the size and scaled up", backend="none",
        inject="measured:resized_image",
        code="outputs-differ", says="in image 0; each of 4 calls alone exact", exit_code=3,
    ),
    "other-size": Fault(
        part="output", breaks="one arm's picture has half the size", backend="none", inject="measured:other_size",
        code="failed", says="16x16 pixels, asked were 32x32", exit_code=7,
    ),
    "other-sound": Fault(
        part="output", breaks="frames are right, the sound is not", backend="none",
        inject="measured:other_sound", model="tiny/ltx-2",
        code="outputs-differ", says="in audio", exit_code=3,
    ),
    "one-wrong-frame": Fault(
        part="output", breaks="one pixel of one frame of a video is one level off", backend="none",
        inject="measured:one_wrong_frame",
        model="tiny/sana-video", code="outputs-differ", says="max difference 1,", exit_code=3,
    ),
}  # fmt: skip
