"""Every value that is stored or passed between modules: frozen dataclasses, standard library only.

Units stand in names: `_s` seconds, `_bytes`, `_db`, `_px`, `_hz`, `_w`, `_c`. Raw samples are kept, unrounded.
A new stored field needs a new `SCHEMA_VERSION`, a step in `migrations.py` and a golden file under `tests/golden`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Literal

SCHEMA_VERSION = 4

Status = Literal["OK", "INVALID", "FAILED", "SKIPPED"]
Weights = Literal["pretrained", "random"]
Question = Literal["rerun", "padding", "graph", "ranks", "arithmetic"]
Phase = Literal["first", "warm", "req1", "req2", "req1-again", "measure"]
Speed = Literal["FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "INVALID", "NOT-TIMED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of a suite: a model at a shape, with everything that changes what is computed or how it is measured."""

    model: str
    """Key of `models.MODELS`, e.g. "Qwen/Qwen-Image" or "tiny/qwen-image"."""
    width_px: int
    height_px: int
    frames: int | None = None
    """Video frames; None for images."""
    steps: int
    """Denoise steps of one request."""
    guidance: float | None = None
    """Guidance scale; None is the model's default."""
    prompts: tuple[str, ...]
    """At least two, so that request 1 and request 2 differ. The first is the short one."""
    token_counts: tuple[int, ...] | None = None
    """Prompt tokens per prompt for synthetic embeddings, where the model's tokenizer is not at hand."""
    seed: int = 42
    dtype: str = "bfloat16"
    device: str = "cuda"
    weights: Weights = "pretrained"
    source: str | None = None
    """Local diffusers folder to load from, instead of the hub id `model`."""
    buckets: tuple[int, ...] | None = None
    """Prompt-length buckets; None is the model's own policy, () is native length."""
    break_policy: str = "attention"
    """"attention", "none", or dotted names separated by commas; used by the `bcg` runner."""
    runners: tuple[str, ...] = ("eager", "bcg", "graph")
    rounds: int = 10
    """Images measured per arm; one image is one sample."""
    profile: bool = True
    timeout_s: float = 1800.0
    prior: str | None = None
    """File of a saved prior to replay; None draws one from `seed`. With a file the seed is the file's."""
    rewrite_prompts: bool = False
    """Whether the model's own rewriting of prompts runs, once per prompt, before any arm."""
    parallel: str = "none"
    """How one request is shared among processes: "none", "cfg:2" or "context:N"; see `parallel.py`."""

    @property
    def resolution(self) -> str:
        """`WxH` or `WxHxFRAMES`, in pixels."""
        return f"{self.width_px}x{self.height_px}" + (f"x{self.frames}" if self.frames else "")

    @property
    def key(self) -> str:
        """Stable name of the cell: same key, same work. Excludes which arms are run and how often."""
        skipped = {"runners", "rounds", "profile", "timeout_s"}
        # Added after schema 1: keys of stored cases, which name their samples, must stay.
        skipped |= {name for name in ("prior", "rewrite_prompts") if not getattr(self, name)}
        skipped |= {"parallel"} if self.parallel == "none" else set()
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.model).strip("-").lower()
        return f"{slug}-{self.resolution}-{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a record or a verdict is what it is: a stable code for programs, a sentence for people."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver describes it. `uuid_sha256` identifies it without publishing the UUID."""

    name: str
    uuid_sha256: str
    memory_bytes: int
    driver: str
    sm_clock_max_hz: int | None = None
    power_limit_w: float | None = None
    other_processes: int | None = None
    """Compute processes of others on this GPU when the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and software of a worker process. `settings` and `env_vars` are allow-listed."""

    gpu: Gpu | None
    cpu: str
    cpu_count: int
    memory_bytes: int
    os: str
    python: str
    packages: dict[str, str]
    """Name to version: bcgbench, torch, diffusers, transformers, cuda-bindings, ..."""
    cuda: str | None
    git_commit: str | None
    git_dirty: bool | None
    host_launch_s: float | None
    """Host seconds per kernel launch, median over a few thousand tiny launches; eager speed depends on it."""
    settings: dict[str, str]
    """Resolved torch settings that change numerics or speed (TF32, deterministic, cudnn.benchmark, SDPA backends)."""
    env_vars: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """Clocks and limits at one moment. `throttle_bits` are NVML's clock-event reasons; 0x4 is a software power cap."""

    sm_clock_hz: int
    memory_clock_hz: int
    power_w: float
    temperature_c: float
    throttle_bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One image (or video) as measured. Times of the denoise span come from two independent clocks."""

    runner: str
    phase: Phase
    round: int
    """Round of the ABBA schedule; images of one round form pairs. 0 outside phase "measure"."""
    order: int
    """Position within the round."""
    prompt: int
    """Index into `Case.prompts`."""
    denoise_event_s: float | None
    """CUDA-event time from before the first to after the last denoise step, summed over the loops; None on a CPU."""
    denoise_host_s: float
    """Host time of the same span with a device synchronise at both ends."""
    before_s: float
    """Host time from the request to the denoise span (text encoding, latents), synchronised. Between two loops too."""
    after_s: float
    """Host time from the denoise span to the finished image (decoding), synchronised."""
    end_to_end_s: float
    """Host time of the whole request, measured on its own, not summed."""
    step_s: tuple[float, ...]
    """Per denoise step, by CUDA events on a GPU and by host clock on a CPU. Step 0 is the first entry."""
    forwards: int
    """Transformer calls made by the pipeline."""
    replays: int
    fallbacks: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    gpu_state: GpuState | None = None
    loop_steps: tuple[int, ...] = ()
    """Steps of each denoise loop, in the order of `step_s`; more than one where a request has stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A call that had no captured graph. `difference` compares it with the nearest captured signature."""

    module: str
    reason: str
    difference: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engagement:
    """Proof that the graphs ran, over warm-up and all measured requests of one arm."""

    captures: tuple[int, ...]
    """Graphs captured by the end of preparation, req1, req2, req1 again; equal when nothing was captured late."""
    signatures: tuple[str, ...]
    """One line per captured signature."""
    segments: int
    """CUDA-graph segments of the largest captured graph."""
    breaks: int
    expected_forwards: int
    replays: int
    fallbacks: int
    misses: tuple[Miss, ...]
    evictions: int = 0
    uncalled: tuple[str, ...] = ()
    """Captured graphs of lengths that no prompt has, so no request replayed them."""
    unengaged: tuple[str, ...] = ()
    """Captured graphs of calls that the traced requests made and no later request replayed: "captured, not engaged"."""
    graph_nodes: int | None = None
    """Kernel and memory nodes of the largest captured graph."""
    prepare_forwards: int = 0
    """Forwards spent on warm calls and captures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one arm. `pool_bytes` is the arm's private graph pool, 0 for eager."""

    weights_bytes: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    pool_bytes: int | None
    growth_bytes: tuple[int, ...] = ()
    """Growth of reserved memory per captured signature, in order of capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A separate, untimed pass. All counts are per denoise step, the mean over all loops."""

    launches: dict[str, float]
    """Host launch calls by kind: "kernel", "graph", "memcpy", "memset"."""
    kernels: float
    """Kernels seen on the GPU."""
    busy_s: float | None
    """Union of kernel time; None when the trace was incomplete."""
    note: str = ""
    """Why a figure is missing, e.g. fewer kernels traced than the graphs hold."""
    loop_steps: tuple[int, ...] = ()
    """Steps of each denoise loop of this pass; () where it was not recorded (schema 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two arrays compared. All statistics in float64. `exact` means equal dtype, shape and bytes."""

    name: str
    """What was compared: "latents 0", "image 1", "audio 1", "call 12"."""
    exact: bool
    sha256_a: str
    sha256_b: str
    total: int
    differing: int
    max_abs: float
    mean_abs: float
    rms: float
    bounding_box: tuple[tuple[int, int], ...] | None
    """Per axis, first and last differing index; None when exact."""
    data_range: float
    """The span that `psnr_db` refers to. For audio the reference's RMS, which makes `psnr_db` its SNR."""
    psnr_db: float | None
    """10 log10(data_range² / MSE); None when exact (never infinity) or not finite."""
    ssim: float | None = None
    """Images only: Gaussian window 11, sigma 1.5 (Wang et al. 2004)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """One question about an arm's outputs, answered against a reference arm.

    "rerun": eager against eager; "padding": eager on padded inputs against eager; "graph": this arm against eager on
    the same padded inputs, which must be exact; "ranks": several processes against one that runs every call whole;
    "arithmetic": an arm that computes in another way than eager, against eager on the same inputs, where `Accuracy`
    says what the difference is worth.
    """

    question: Question
    reference: str
    calls: int
    """Transformer calls compared on identical inputs."""
    calls_exact: int
    first_call: int | None
    """Index of the first call that differs."""
    worst_call: Difference | None
    latents: tuple[Difference, ...]
    images: tuple[Difference, ...]
    audio: tuple[Difference, ...] = ()
    """Waveforms, where the model makes sound."""

    @property
    def finals(self) -> tuple[Difference, ...]:
        """Everything that a request ends with: latents, images, audio."""
        return (*self.latents, *self.images, *self.audio)

    @property
    def exact(self) -> bool:
        """Whether every call, latent, image and waveform is bit-exact."""
        return self.calls == self.calls_exact and bool(self.finals) and all(d.exact for d in self.finals)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """One process of a parallel case, as the arm ran on it. `gpu` is None on a CPU."""

    rank: int
    gpu: str | None
    denoise_s: tuple[float, ...]
    """Per measured image, by CUDA events on a GPU and by the host's clock on a CPU."""
    divided: int
    """Transformer calls of all arms of which this rank ran its share ..."""
    whole: int
    """... and those that it ran whole, because there was nothing to share."""
    gpu_busy: float | None
    """Kernel time over the unprofiled step, without kernels that wait for another rank."""
    engagement: Engagement | None
    memory: Memory | None
    profile: Profile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of an arm, and of eager on the same inputs, against a reference of the same calls in a wider dtype.

    Errors are root mean squares over all values of a call's outputs, relative to that of the reference.
    """

    dtype: str
    """Of the reference: "float32", for a model in float32 "float64"."""
    calls: int
    """Calls with a reference, of `Fidelity.calls`; 0 if there is none."""
    worst_call: int | None = None
    """Index of the call whose error is largest against what eager's allows."""
    error: float | None = None
    """Of this arm in that call."""
    eager_error: float | None = None
    """Of eager in that call."""
    unrepeated: int = 0
    """Requests of this arm that did not give what the same request gave before."""
    note: str = ""
    """Why there is no reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What torch.compile did in an arm, by its own counters. Frames are functions that it looked at."""

    regions: int
    """Compiled regions that one forward runs, where a graph is captured of them; else 0."""
    graphs: int
    """Compiled in preparation."""
    graph_breaks: int
    cache_hits: int
    """Of the graphs, taken from inductor's cache on disk: preparation was shorter by as many compilations."""
    late_frames: int
    """After preparation; any means that a measured request compiled, or ran eagerly."""
    late_graphs: int
    cudagraph_skips: int
    """Compiled graphs that were to run as CUDA graphs and do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One arm of one case: the samples and everything needed to believe them."""

    run_id: str
    case: Case
    runner: str
    attempt: int
    """Counts from 1; a resumed case begins a new attempt and only the newest is reported."""
    status: Status
    reasons: tuple[Reason, ...] = ()
    created_utc: str
    environment: Environment | None = None
    backend: Literal["cuda", "tape", "none"] = "none"
    """What replays the segments. A tape run carries fidelity and graph use, never speed."""
    synthetic: bool = False
    """Prompts were seeded embeddings and weights random: real arithmetic, no meaningful picture."""
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Resolved configuration of the arm; arms are compared only if it differs in the declared switch."""
    token_counts: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()
    engagement: Engagement | None = None
    memory: Memory | None = None
    profile: Profile | None = None
    fidelity: tuple[Fidelity, ...] = ()
    accuracy: Accuracy | None = None
    """Of an arm whose outputs need not equal eager's bit for bit."""
    compilation: Compilation | None = None
    load_s: float | None = None
    first_call_s: float | None = None
    prepare_s: float | None = None
    """Compilation, warm calls and captures, once per process."""
    signature_s: float | None = None
    """Median host time to compute the signature of one call."""
    hook_s: float | None = None
    """Median host time that the forward hook adds to one call, the forward itself excluded."""
    denoise_flops: float | None = None
    """Floating-point operations of one denoise of prompt 0; None where no speed is measured."""
    artifacts: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name to path relative to the run folder: images, videos, audio and latents. Equal outputs share a file."""
    ranks: tuple[RankResult, ...] = ()
    """Every process of a parallel case; the fields above are those of rank 0."""

    @property
    def measured(self) -> tuple[Sample, ...]:
        """Samples of the interleaved rounds, in the order measured."""
        return tuple(s for s in self.samples if s.phase == "measure")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Header of a journal: what was asked for."""

    run_id: str
    created_utc: str
    schema_version: int
    tool_version: str
    command: str
    suite: str | None
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A centre with an interval at `confidence`; `method` names how it was computed."""

    centre: float
    low: float
    high: float
    confidence: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Arm `b` judged against arm `a` on one case. Ratios are a/b, so above 1 means b is faster."""

    case: Case
    a: str
    b: str
    speed: Speed
    ratio: Interval | None
    """Median and order-statistic interval of the pairwise ratio of denoise times a/b."""
    pairs: int
    exact: bool | None
    """Graph question of arm b, or of two runs whether one prior gave equal outputs: True, False, None not judged."""
    fidelity: str
    """One phrase, e.g. "exact", "differs: max 0.016 at latents 0"."""
    padding: str
    """One phrase on the padding question, "" where the policy does not pad."""
    memory_ratio: float | None
    """Peak allocated of b over a."""
    reasons: tuple[Reason, ...]
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a model without loading it; importing no torch."""

    id: str
    """Key in `models.MODELS`."""
    pipeline: str
    """diffusers pipeline class name."""
    aliases: tuple[str, ...] = ()
    """Other hub ids that hold the same architecture in diffusers layout."""
    width_px: int
    height_px: int
    frames: int | None = None
    frame_rate: float = 24.0
    """Frames a second at which a video is played."""
    multiple_px: int
    """Width and height must be multiples of this; nothing is binned or rounded silently."""
    steps: int
    second_stage_steps: int = 0
    """Denoise steps that a request makes after `steps`, in a second loop: one transformer call each."""
    guidance: float
    branches: int
    """Transformer calls per denoise step at the default guidance."""
    policy: str
    """One line: how prompt length enters the graph, e.g. "buckets with mask"."""
    buckets: tuple[int, ...] = ()
    """Default prompt-length buckets; empty when the policy has none."""
    text_tokens: int | None = None
    """Fixed text length, where the pipeline pads to one."""
    tokens: int | None = None
    """Image or video rows of one transformer call at the default size, over the whole batch; None where one call is one
    picture and a row covers `multiple_px` by `multiple_px`."""
    transformer_parameters: int
    """Exact parameter count of the denoiser at the released configuration."""
    memory_bytes: int
    """Estimated peak for a bf16 run with random weights (denoiser, VAE, activations, graph pools)."""
    tiny: bool = False
    generic: bool = False
    """Driven by the generic adapter, which knows the pipeline's signature and nothing of the model: not validated."""
    break_policy: str = "attention"
    """What the `bcg` runner breaks at where the user names nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a running case is; for display only, never stored."""

    case: str
    stage: str
    """"load", "trace", "prepare", "requests", "measure", "check", "profile"."""
    arm: str = ""
    done: int = 0
    total: int = 0
    step: int = 0
    eta_s: float | None = None
