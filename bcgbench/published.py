"""Figures that others published of breakable CUDA graphs: numbers and their source, one literal row each.

Here: what was published and the compute floor of a row. Not here: our own figures, the text that sets both side by side
(`reports/markdown_published.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bcgbench.floor import peak_of

if TYPE_CHECKING:
    from bcgbench.types import Case

Pair = tuple[float, float]
"""(eager, bcg)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one source says of a model at one shape."""

    model: str
    width_px: int
    height_px: int
    frames: int | None = None
    """None is any number of frames."""
    gpu: str
    gpus: int = 1
    engine: str = "SGLang"
    source: str
    steps: int | None = None
    """Denoise steps of the published times; None where they are not known."""
    denoise_s: Pair | None = None
    speedup: float | None = None
    """Eager over bcg denoise as published, of times less rounded than those here."""
    total_s: Pair | None = None
    step_s: Pair | None = None
    """As published; else `per_step_s` divides the denoise times."""
    busy: Pair | None = None
    launches_per_step: Pair | None = None
    peak_bytes: Pair | None = None
    parameters: int | None = None
    """Of a model whose every row passes (nearly) every parameter: what the floor rests on."""
    rows: int | None = None
    """Image rows of all transformer calls of one step; text rows are left out, so that the floor stays one."""
    note: str = ""
    """What explains a difference and cannot be told from the other fields."""

    def fits(self, case: Case) -> bool:
        """Whether a case is this model at this shape."""
        same = (case.model, case.width_px, case.height_px) == (self.model, self.width_px, self.height_px)
        return same and self.frames in (None, case.frames)

    @property
    def per_step_s(self) -> Pair | None:
        """Seconds per denoise step."""
        if self.step_s is not None or self.denoise_s is None or self.steps is None:
            return self.step_s
        return self.denoise_s[0] / self.steps, self.denoise_s[1] / self.steps

    @property
    def floor_s(self) -> float | None:
        """Least possible seconds of all steps: 2 * parameters * rows FLOPs per step at the GPU's dense bf16 rate."""
        peak = peak_of(self.gpu)
        if self.parameters is None or self.rows is None or self.steps is None or peak is None:
            return None
        return 2 * self.parameters * self.rows * self.steps / (peak * self.gpus)


_BCG = "https://github.com/sgl-project/sglang/pull/27436"
_STEPS = "steps are the model's default, the source states none"

FIGURES: tuple[Figure, ...] = (
    Figure(
        model="Qwen/Qwen-Image", width_px=512, height_px=512, gpu="B200", source=_BCG, steps=50,
        denoise_s=(6.48, 2.45), speedup=2.64, total_s=(6.48, 2.45), peak_bytes=(55.038e9, 58.098e9), note=_STEPS,
    ),
    Figure(
        model="Qwen/Qwen-Image-2512", width_px=512, height_px=512, gpu="B200", source=_BCG, steps=50,
        denoise_s=(6.21, 2.44), speedup=2.55, total_s=(6.21, 2.44), peak_bytes=(55.038e9, 58.098e9), note=_STEPS,
    ),
    Figure(
        model="Tongyi-MAI/Z-Image", width_px=256, height_px=256, gpu="B200", source=_BCG, steps=50,
        denoise_s=(1.205, 0.634), speedup=1.90, total_s=(1.231, 0.662), peak_bytes=(19.611e9, 20.635e9),
        parameters=6_154_908_736, rows=2 * 256, note=_STEPS,
    ),
    Figure(
        model="Tongyi-MAI/Z-Image-Turbo", width_px=512, height_px=512, gpu="B200", source=_BCG, steps=9,
        denoise_s=(0.113, 0.026), speedup=4.26, total_s=(0.138, 0.097), peak_bytes=(20.400e9, 22.682e9),
        parameters=6_154_908_736, rows=1024,
        note="a total 71 ms above the denoise time, where eager's is 25 ms above, suggests a span closed while the GPU "
        "still worked",
    ),
    Figure(
        model="zai-org/GLM-Image", width_px=512, height_px=512, gpu="B200", source=_BCG, steps=30,
        denoise_s=(1.100, 0.878), speedup=1.25, total_s=(8.056, 8.082), peak_bytes=(35.855e9, 36.324e9),
        note="totals there include sampling the prior, 7 s of the 8; here it is drawn before and shared by all arms",
    ),
    Figure(
        model="Comfy-Org/Ideogram-4", width_px=512, height_px=512, gpu="B200", source=_BCG,
        denoise_s=(1.564, 0.916), speedup=1.71, total_s=(1.625, 0.991), peak_bytes=(23.068e9, 29.418e9),
        note="fp8 weights there, by their size, bf16 here; the source states no steps",
    ),
    Figure(
        model="Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers", width_px=1024, height_px=1024, gpu="H200",
        source="https://github.com/sgl-project/sglang/pull/33989", steps=20,
        denoise_s=(0.6992, 0.4081), total_s=(0.821, 0.608), busy=(0.285, 0.933),
        launches_per_step=(8412 / 5, 132 / 5), parameters=1_604_641_952, rows=2 * 1024,
        note="busy there is of the profiled window, which profiling lengthens, here of the unprofiled step; 26 "
        "launches a step are fewer than 21 segments and 20 eager attentions make, so not all are counted there; "
        + _STEPS,
    ),
    Figure(
        model="Efficient-Large-Model/SANA-Video_2B_480p_diffusers", width_px=832, height_px=480, frames=81, gpu="H200",
        source="https://github.com/sgl-project/sglang/pull/35729", steps=8,
        step_s=(0.9206, 0.7978), peak_bytes=(21.44e9, 24.80e9), note="peak there is of reserved memory",
    ),
    Figure(
        model="Lightricks/LTX-2", width_px=768, height_px=512, frames=121, gpu="H200", gpus=2,
        source="https://github.com/sgl-project/sglang/pull/33885", busy=(0.279, 0.962),
        note="each GPU there runs one half of the guidance, so half the work per launch, in two stages; one stage "
        "here, and only `--parallel cfg:2` halves the guidance",
    ),
)  # fmt: skip
"""In the order of their sources."""
