"""What published runs prove of each model: exact on a CPU in tiny form, at full size on a GPU, when and with what.

Read from the journals of published runs, never typed in. Here: which records count and for whom. Not here: which models
there are (`models`), how the state is shown (`cli_models.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bcgbench import store
from bcgbench.errors import StoreError
from bcgbench.outputs import answer
from bcgbench.types import Environment, Record

TINY_FORM: dict[str, str] = {
    "Qwen/Qwen-Image": "tiny/qwen-image",
    "Qwen/Qwen-Image-2512": "tiny/qwen-image-2512",
    "Tongyi-MAI/Z-Image": "tiny/z-image",
    "Tongyi-MAI/Z-Image-Turbo": "tiny/z-image-turbo",
    "Comfy-Org/Ideogram-4": "tiny/ideogram-4",
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": "tiny/sana1.5",
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": "tiny/sana-video",
    "Lightricks/LTX-2": "tiny/ltx-2",
    "Lightricks/LTX-2-two-stage": "tiny/ltx-2-two-stage",
    "Lightricks/LTX-2.3": "tiny/ltx-2.3",
    "MiniMaxAI/MiniMax-H3": "tiny/minimax-h3",
    "zai-org/GLM-Image": "tiny/glm-image",
    "meituan-longcat/LongCat-Image": "tiny/longcat-image",
}
"""Released model -> the tiny one with its adapter and pipeline, which is what a CPU runs in its place."""

PUBLISHED = Path(__file__).parents[1] / "results"
"""The published runs of a checkout; they are not installed with the package."""

Kind = Literal["CPU", "GPU"]
_KIND_OF: dict[str, Kind] = {"tape": "CPU", "cuda": "GPU"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the newest published run says of a model on a kind of device."""

    kind: Kind
    model: str
    """The model that was run: of a released one on a CPU, its tiny form."""
    exact: bool
    """Whether every graph arm was OK and bit-exact against eager on the same inputs."""
    date: str
    """ISO 8601, UTC."""
    device: str
    """Name of the GPU, or "CPU"."""
    torch: str
    diffusers: str
    commit: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known of all models, and which run folders could not be read."""

    found: dict[tuple[str, Kind], Evidence]
    unreadable: tuple[str, ...]
    runs: int

    def of(self, model: str, kind: Kind) -> Evidence | None:
        """The evidence for a model; on a CPU that of its tiny form."""
        return self.found.get((TINY_FORM.get(model, model) if kind == "CPU" else model, kind))


def read(results: Path) -> State:
    """The state of validation by all runs in a folder, the newest run of a model and device deciding.

    Only runs of a commit without local changes count: others cannot be repeated.
    """
    found: dict[tuple[str, Kind], Evidence] = {}
    unreadable, paths = [], store.list_runs(results)
    for path in paths:
        try:
            records = store.open_run(path).records()
        except StoreError:
            unreadable.append(path.name)
        else:
            found |= _evidence(records)
    return State(found=found, unreadable=tuple(unreadable), runs=len(paths) - len(unreadable))


def _evidence(records: Iterable[Record]) -> dict[tuple[str, Kind], Evidence]:
    """One entry per model and kind of device: exact only if every judged graph arm of the run was."""
    found: dict[tuple[str, Kind], Evidence] = {}
    for record in records:
        kind, graph, environment = _KIND_OF.get(record.backend), answer((record,), "graph"), record.environment
        if kind is None or graph is None or record.status not in ("OK", "INVALID"):
            continue
        if environment is None or environment.git_dirty is not False:
            continue
        earlier = found.get((record.case.model, kind))
        is_exact = record.status == "OK" and graph.exact and (earlier is None or earlier.exact)
        found[record.case.model, kind] = _of(record, environment, kind=kind, exact=is_exact)
    return found


def _of(record: Record, environment: Environment, *, kind: Kind, exact: bool) -> Evidence:
    on_gpu = kind == "GPU" and environment.gpu is not None
    return Evidence(
        kind=kind,
        model=record.case.model,
        exact=exact,
        date=record.created_utc[:10],
        device=environment.gpu.name if on_gpu and environment.gpu else "CPU",
        torch=environment.packages.get("torch", "unknown"),
        diffusers=environment.packages.get("diffusers", "unknown"),
        commit=(environment.git_commit or "unknown")[:7],
        run=record.run_id,
    )
