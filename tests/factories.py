"""Valid values of every stored type, for tests: `case()`, `sample()`, `record()`, `graph_record()`, ...

Each function fills all fields with one coherent story (a 20-step Qwen-Image request at 512x512 on an H200, 1.0 s in
eager) and takes any field by keyword to change it. Nothing here asserts, and nothing here imports torch.
Use as `from tests.factories import record`; run tests from the repository root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bcgbench import types as t

# fmt: off (one field a line would carry this file past 300 lines)
GIB = 1 << 30
RUN_ID = "20261129T151200Z-smoke-0a1b2c3d"
CREATED_UTC = "2026-11-29T15:12:00Z"
# Deterministic spread of +-0.4%, so that intervals are not degenerate.
JITTER = (0.0, 0.002, -0.003, 0.001, -0.001, 0.004, -0.002, 0.003, -0.004, 0.0005)


def case(**changes: Any) -> t.Case:
    """A 20-step Qwen-Image case at 512x512 with a short and a long prompt."""
    base = t.Case(
        model="Qwen/Qwen-Image",
        width_px=512,
        height_px=512,
        steps=20,
        guidance=4.0,
        prompts=("A small red cube on a white table", "A detailed cinematic scene of a glass observatory"),
    )
    return replace(base, **changes)


def reason(**changes: Any) -> t.Reason:
    """A reason with the code "not-engaged"."""
    return replace(t.Reason(code="not-engaged", text="0 of 40 forwards were replayed"), **changes)


def gpu(**changes: Any) -> t.Gpu:
    """An idle H200."""
    base = t.Gpu(
        name="NVIDIA H200",
        uuid_sha256="ab" * 32,
        memory_bytes=141 * GIB,
        driver="570.86.15",
        sm_clock_max_hz=1_980_000_000,
        power_limit_w=700.0,
        other_processes=0,
    )
    return replace(base, **changes)


def environment(**changes: Any) -> t.Environment:
    """A Linux machine with one H200."""
    base = t.Environment(
        gpu=gpu(),
        cpu="Intel(R) Xeon(R) Platinum 8480+",
        cpu_count=16,
        memory_bytes=128 * GIB,
        os="Linux 6.8",
        python="3.12.3",
        packages={"bcgbench": "0.1.0", "torch": "2.13.0", "diffusers": "0.42.1", "transformers": "5.0.0"},
        cuda="12.9",
        git_commit="0123456789abcdef0123456789abcdef01234567",
        git_dirty=False,
        host_launch_s=4.2e-6,
        settings={"tf32": "False", "deterministic": "False", "cudnn.benchmark": "False"},
        env_vars={},
    )
    return replace(base, **changes)


def gpu_state(**changes: Any) -> t.GpuState:
    """A GPU at full clocks, not throttled."""
    base = t.GpuState(
        sm_clock_hz=1_980_000_000,
        memory_clock_hz=3_201_000_000,
        power_w=520.0,
        temperature_c=54.0,
        throttle_bits=0,
    )
    return replace(base, **changes)


def sample(*, denoise_s: float = 1.0, **changes: Any) -> t.Sample:
    """One measured eager image whose clocks agree and whose stages add up; `denoise_s` sets all times that follow."""
    steps = changes.pop("steps", 20)
    base = t.Sample(
        runner="eager",
        phase="measure",
        round=0,
        order=0,
        prompt=0,
        denoise_event_s=denoise_s,
        denoise_host_s=denoise_s + 2e-4,
        before_s=0.02,
        after_s=0.05,
        end_to_end_s=denoise_s + 0.0705,
        step_s=(denoise_s / steps,) * steps,
        forwards=2 * steps,
        replays=0,
        fallbacks=0,
        peak_allocated_bytes=60 * GIB,
        peak_reserved_bytes=64 * GIB,
        gpu_state=gpu_state(),
    )
    return replace(base, **changes)


def samples(
    *, denoise_s: float | Sequence[float] = 1.0, rounds: int = 10, first: int = 0, **changes: Any
) -> tuple[t.Sample, ...]:
    """One measured sample per round, in ABBA order. A scalar `denoise_s` gets `JITTER`; a sequence is kept as it is."""
    if isinstance(denoise_s, Sequence):
        times = tuple(denoise_s)
    else:
        times = tuple(denoise_s * (1 + JITTER[i % len(JITTER)]) for i in range(rounds))
    return tuple(sample(denoise_s=s, round=i, order=(i + first) % 2, **changes) for i, s in enumerate(times))


def miss(**changes: Any) -> t.Miss:
    """A call whose prompt is longer than the captured one."""
    base = t.Miss(
        module="transformer",
        reason="no captured signature matches",
        difference=("encoder_hidden_states: shape (1, 64, 3584) captured, (1, 71, 3584) called",),
        count=3,
    )
    return replace(base, **changes)


def engagement(**changes: Any) -> t.Engagement:
    """Two captured signatures, every forward replayed."""
    base = t.Engagement(
        captures=(2, 2, 2, 2),
        signatures=("hidden_states (1, 1024, 64) bfloat16, text 64", "hidden_states (1, 1024, 64) bfloat16, text 128"),
        segments=61,
        breaks=60,
        expected_forwards=560,
        replays=560,
        fallbacks=0,
        misses=(),
        graph_nodes=1820,
        prepare_forwards=6,
    )
    return replace(base, **changes)


def memory(**changes: Any) -> t.Memory:
    """Eager memory: no graph pool."""
    base = t.Memory(
        weights_bytes=54 * GIB,
        peak_allocated_bytes=60 * GIB,
        peak_reserved_bytes=64 * GIB,
        pool_bytes=0,
    )
    return replace(base, **changes)


def profile(**changes: Any) -> t.Profile:
    """An eager profile: one host launch per kernel."""
    base = t.Profile(
        launches={"kernel": 3640.0, "graph": 0.0, "memcpy": 4.0, "memset": 2.0},
        kernels=3640.0,
        busy_s=0.02,
    )
    return replace(base, **changes)


def accuracy(**changes: Any) -> t.Accuracy:
    """An arm in another arithmetic, as far from float32 as eager is."""
    return replace(t.Accuracy(dtype="float32", calls=12, worst_call=7, error=0.011, eager_error=0.01), **changes)


def compilation(**changes: Any) -> t.Compilation:
    """Compiled in preparation, and nothing since."""
    base = t.Compilation(
        regions=136, graphs=12, graph_breaks=8, cache_hits=0, late_frames=0, late_graphs=0,
        cudagraph_skips=0,
    )  # fmt: skip
    return replace(base, **changes)


def difference(**changes: Any) -> t.Difference:
    """Two latents that are bit-exact. See `unequal()` for the other kind."""
    base = t.Difference(
        name="latents 0",
        exact=True,
        sha256_a="11" * 32,
        sha256_b="11" * 32,
        total=65536,
        differing=0,
        max_abs=0.0,
        mean_abs=0.0,
        rms=0.0,
        bounding_box=None,
        data_range=8.0,
        psnr_db=None,
    )
    return replace(base, **changes)


def unequal(**changes: Any) -> t.Difference:
    """Two latents that differ a little: max 0.015625, 61.2 dB."""
    base = difference(
        exact=False,
        sha256_b="22" * 32,
        differing=1200,
        max_abs=0.015625,
        mean_abs=0.0004,
        rms=0.007,
        bounding_box=((0, 0), (3, 900), (0, 63)),
        psnr_db=61.2,
    )
    return replace(base, **changes)


def fidelity(**changes: Any) -> t.Fidelity:
    """The graph question answered "exact" on every call, latent and image."""
    base = t.Fidelity(
        question="graph",
        reference="eager",
        calls=40,
        calls_exact=40,
        first_call=None,
        worst_call=None,
        latents=(difference(), difference(name="latents 1")),
        images=(difference(name="image 0", data_range=255.0), difference(name="image 1", data_range=255.0)),
    )
    return replace(base, **changes)


def inexact(*, difference: t.Difference | None = None, **changes: Any) -> t.Fidelity:
    """A question answered "differs": from call 12 on, and in the latents and images of prompt 0."""
    found = difference or unequal()
    base = fidelity(
        calls_exact=12,
        first_call=12,
        worst_call=replace(found, name="call 39"),
        latents=(found,),
        images=(replace(found, name="image 0", data_range=255.0, max_abs=3.0, psnr_db=52.0, ssim=0.9991),),
    )
    return replace(base, **changes)


def record(*, denoise_s: float | Sequence[float] = 1.0, **changes: Any) -> t.Record:
    """A valid eager record with 10 measured rounds; `denoise_s` sets its times."""
    runner = changes.get("runner", "eager")
    base = t.Record(
        run_id=RUN_ID,
        case=case(),
        runner=runner,
        attempt=1,
        status="OK",
        created_utc=CREATED_UTC,
        environment=environment(),
        settings={"runner": runner, "attention": "native", "dtype": "bfloat16"},
        token_counts=(9, 34),
        samples=samples(denoise_s=denoise_s, runner=runner),
        memory=memory(),
        profile=profile(),
        fidelity=(fidelity(question="rerun"), fidelity(question="padding")),
        load_s=41.0,
        first_call_s=0.9,
        denoise_flops=2e14,
        artifacts={"image-0": "artifacts/eager/image-0.png"},
    )
    return replace(base, **changes)


def graph_record(*, denoise_s: float | Sequence[float] = 0.5, **changes: Any) -> t.Record:
    """A valid `bcg` record, twice as fast as `record()`: every forward replayed, bit-exact against eager."""
    runner = changes.get("runner", "bcg")
    base = record(
        runner=runner,
        backend="cuda",
        settings={
            "runner": runner,
            "attention": "native",
            "dtype": "bfloat16",
            "capture": "segments",
            "break_policy": "attention",
            "padding": "buckets",
        },
        samples=samples(denoise_s=denoise_s, runner=runner, first=1, replays=40),
        engagement=engagement(),
        memory=memory(peak_allocated_bytes=61 * GIB, pool_bytes=GIB, growth_bytes=(GIB, 0)),
        profile=profile(launches={"kernel": 120.0, "graph": 61.0, "memcpy": 5.0, "memset": 0.0}),
        fidelity=(fidelity(question="graph"),),
        prepare_s=3.1,
        signature_s=8e-6,
        hook_s=2e-5,
        artifacts={"image-0": f"artifacts/{runner}/image-0.png"},
    )
    return replace(base, **changes)


def rival_record(*, denoise_s: float | Sequence[float] = 0.4, **changes: Any) -> t.Record:
    """A valid `compile` record: inexact, within tolerance, 30 s of compilation."""
    runner = changes.get("runner", "compile")
    base = record(
        runner=runner,
        settings={"runner": runner, "attention": "native", "dtype": "bfloat16", "compile": "60 blocks"},
        samples=samples(denoise_s=denoise_s, runner=runner),
        fidelity=(inexact(question="arithmetic", reference="eager-padded"),),
        accuracy=accuracy(),
        compilation=compilation(regions=0),
        prepare_s=30.0,
    )
    return replace(base, **changes)


def run_info(**changes: Any) -> t.RunInfo:
    """The header of a run of one case."""
    base = t.RunInfo(
        run_id=RUN_ID,
        created_utc=CREATED_UTC,
        schema_version=t.SCHEMA_VERSION,
        tool_version="0.1.0",
        command="bcgbench run smoke",
        suite="smoke",
        cases=(case(),),
    )
    return replace(base, **changes)


def interval(**changes: Any) -> t.Interval:
    """A ratio of 2.0 with a tight interval."""
    return replace(t.Interval(centre=2.0, low=1.99, high=2.01, confidence=0.95, method="order-statistic"), **changes)


def verdict(**changes: Any) -> t.Verdict:
    """`bcg` is twice as fast as eager and exact."""
    base = t.Verdict(
        case=case(),
        a="eager",
        b="bcg",
        speed="FASTER",
        ratio=interval(),
        pairs=10,
        exact=True,
        fidelity="exact",
        padding="exact",
        memory_ratio=61 / 60,
        reasons=(),
        exit_code=0,
    )
    return replace(base, **changes)


def model_facts(**changes: Any) -> t.ModelFacts:
    """Facts of Qwen-Image."""
    base = t.ModelFacts(
        id="Qwen/Qwen-Image",
        pipeline="QwenImagePipeline",
        width_px=1328,
        height_px=1328,
        multiple_px=16,
        steps=50,
        guidance=4.0,
        branches=2,
        policy="buckets with mask",
        buckets=(64, 128, 256, 512, 1024),
        transformer_parameters=20_430_401_088,
        memory_bytes=60 * GIB,
    )
    return replace(base, **changes)


def progress(**changes: Any) -> t.Progress:
    """The third of ten rounds is being measured."""
    base = t.Progress(case=case().key, stage="measure", arm="bcg", done=3, total=10, step=7, eta_s=12.0)
    return replace(base, **changes)


def codes(found: t.Verdict | tuple[t.Status, tuple[t.Reason, ...]]) -> list[str]:
    """Reason codes of a verdict or of a `judge` answer."""
    return [r.code for r in (found[1] if isinstance(found, tuple) else found.reasons)]


def text(found: t.Verdict | tuple[t.Status, tuple[t.Reason, ...]]) -> str:
    """All reason sentences of a verdict or of a `judge` answer."""
    return " | ".join(r.text for r in (found[1] if isinstance(found, tuple) else found.reasons))
