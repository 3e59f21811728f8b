"""Faults of capture, replay and of the proof that graphs ran. Literal rows only."""

from __future__ import annotations

from bcgbench.faults.fault import Fault

_SGLANG = "sgl-project/sglang#{}".format
_QWEN = "tiny/qwen-image"

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
    "stale-timestep": Fault(
        part="replay", breaks="the smallest input, the time of the step, stays as captured",
        published=("vllm-project/vllm#53915",), inject="engine:stale_timestep",
        code="outputs-differ", says="calls, first call 1", exit_code=3,
    ),
    "uncloned-output": Fault(
        part="replay", breaks="the next replay overwrites what the one before returned",
        published=(_SGLANG(31852), "pytorch/pytorch#148439", "NVIDIA/TensorRT-LLM#16391"),
        inject="engine:uncloned_output", model=_QWEN, code="outputs-differ", says="8 calls alone exact", exit_code=3,
    ),
    "dropped-bridge": Fault(
        part="replay", breaks="what a break returns does not reach the next segment", published=(_SGLANG(30584),),
        inject="engine:dropped_bridge", code="outputs-differ", says="calls, first call", exit_code=3,
    ),
    "skipped-break": Fault(
        part="replay", breaks="what runs eagerly between segments is not run again", inject="engine:skipped_break",
        code="outputs-differ", says="calls, first call", exit_code=3,
    ),
    "skipped-segment": Fault(
        part="replay", breaks="a replay ends before its last step", inject="engine:skipped_segment",
        code="outputs-differ", says="calls, first call", exit_code=3,
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
        part="replay", breaks="every replay draws the same random numbers",
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
        inject="measured:wrong_in_a_round", code="outputs-differ", says="in round", exit_code=3,
    ),
    "freed-reference": Fault(
        part="replay", breaks="a graph reads what a break returned where it lay, and that memory goes to others",
        published=(_SGLANG(30584), _SGLANG(34183), _SGLANG(37606), "NVIDIA/Megatron-LM#3970"), backend="cuda",
        inject="engine:freed_reference", code="outputs-differ", says="calls, first call", exit_code=3,
    ),
    # --- capture ------------------------------------------------------------------------------------------------------
    "failing-capture": Fault(
        part="capture", breaks="the model does what a graph cannot hold", published=(_SGLANG(34929),),
        inject="engine:failing_capture", code="capture-failed", says="indexing with a mask", exit_code=7,
    ),
    "lost-operation": Fault(
        part="capture", breaks="additions run while capturing and are not recorded", backend="cpu",
        inject="engine:lost_operation", code="outputs-differ", says="calls, first call 1", exit_code=3,
        note="replays only part of what was captured, as skipped-segment does",
    ),
    "flipped-bit": Fault(
        part="capture", breaks="a segment's last result is off by one bit when it closes", backend="cpu",
        inject="engine:flipped_bit", code="capture-failed", says="first differing module", exit_code=7,
    ),
    "unjoined-stream": Fault(
        part="capture", breaks="work on a side stream is not joined", published=("vllm-project/vllm#57785",),
        backend="cuda", inject="engine:unjoined_stream", code="capture-failed", exit_code=7,
    ),
    "host-read": Fault(
        part="capture", breaks="the model reads a number on the host that is another in each call",
        published=(_SGLANG(31852),), inject="engine:host_read", code="fallback", says="host read at", exit_code=4,
    ),
    "late-capture": Fault(
        part="capture", breaks="a graph is captured in the middle of a request", published=(_SGLANG(36485),),
        inject="engagement:late_capture", code="late-capture", says="0, 1, 1, 1", exit_code=4,
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
        inject="engagement:eager_in_disguise", code="not-engaged", says="0 of", exit_code=4,
    ),
    "lost-graph": Fault(
        part="engagement", breaks="a call never finds the graph that was captured for it",
        published=(_SGLANG(33885),), inject="engagement:lost_graph",
        code="fallback", says="no graph", exit_code=4,
    ),
    "counted-not-done": Fault(
        part="engagement", breaks="the graph arm runs eagerly, and the cache counts replays",
        published=(_SGLANG(31852),), inject="engagement:counted_not_done",
        code="captured-not-engaged", says="never replayed", exit_code=4,
    ),
    "replay-recomputed": Fault(
        part="engagement", breaks="the graph arm runs eagerly, and every counter says replayed",
        published=(_SGLANG(30016),), inject="engagement:replay_recomputed", case={"profile": True}, shown="gpu",
        code="not-engaged", says="no graph launch", exit_code=4,
        note="the launches are those of the tape's segments, counted in a tiny run and marked as a profiler's",
    ),
    "unhooked": Fault(
        part="engagement", breaks="the pipeline calls another module than the hooked one", published=(_SGLANG(33885),),
        inject="inputs:unhooked", code="not-engaged", says="4 of", exit_code=4,
    ),
    "skipped-prompt": Fault(
        part="engagement", breaks="a graph is captured for a prompt that no request of the arm makes",
        published=(_SGLANG(37890),), inject="inputs:skipped_prompt", model=_QWEN, case={"buckets": (12, 32)},
        code="captured-not-engaged", says="did a stage run", exit_code=3,
    ),
    "baseline-replayed": Fault(
        part="engagement", breaks="the eager arm replays", published=(_SGLANG(30016),),
        inject="engagement:baseline_replayed", code="baseline-replayed", says="baseline without graphs", exit_code=4,
    ),
}  # fmt: skip
