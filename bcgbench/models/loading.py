"""What loading needs of the machine and of the hub: device, dtype, memory, files. Every refusal names a way on.

Building with random weights stands in `weights`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from bcgbench.errors import EnvironmentFault, UsageError
from bcgbench.models import MODELS, facts, prior
from bcgbench.models import folder as folders
from bcgbench.parallel import parse_parallel
from bcgbench.plan import memory_bytes

if TYPE_CHECKING:
    import torch

    from bcgbench.models.base import Adapter
    from bcgbench.types import Case

DTYPES = ("bfloat16", "float16", "float32")
GB = 1e9
log = logging.getLogger(__name__)


def check(case: Case, adapter: Adapter) -> None:
    """Refuse a case whose fields contradict each other or the model (UsageError)."""
    _check_weights(case, adapter)
    if case.buckets and not adapter.facts.buckets:
        raise UsageError(
            f"{adapter.facts.id} has no prompt-length buckets ({adapter.facts.policy}); got {case.buckets}. "
            "Leave buckets unset."
        )
    if adapter.facts.generic and case.token_counts is not None:
        raise UsageError(f"Prompts of {adapter.facts.id} run through its own tokenizers: leave token_counts out.")
    if case.token_counts is not None and len(case.token_counts) != len(case.prompts):
        raise UsageError(
            f"token_counts has {len(case.token_counts)} entries for {len(case.prompts)} prompts: give one per prompt."
        )
    check_parallel(case, adapter)
    check_steps(case.steps, adapter)
    prior.check(case, adapter)


def _check_weights(case: Case, adapter: Adapter) -> None:
    """Random weights have one origin: a release's configuration, or a folder without weights that has no adapter."""
    source = Path(case.source or case.model)
    full = source.is_dir() and folders.weight_bytes(source) > 0
    if case.weights == "random" and (case.source or full):
        raise UsageError(f"Weights cannot be both random and those of {source}: leave out one of the two.")
    if case.weights == "random" and not adapter.facts.generic and adapter.facts.id not in MODELS:
        known = next(name for name in MODELS if facts(name).pipeline == adapter.facts.pipeline)
        raise UsageError(f"Random weights of a {adapter.facts.pipeline} have its release's size: name it, {known}.")
    if case.weights == "pretrained" and adapter.facts.generic and source.is_dir() and not full:
        raise UsageError(f"{source} holds configurations and no weights: add --weights random to measure its size.")


def check_parallel(case: Case, adapter: Adapter) -> None:
    """Refuse to share what a model, or this case of it, does not have (UsageError)."""
    kind = parse_parallel(case.parallel).kind
    guidance = adapter.facts.guidance if case.guidance is None else case.guidance
    if kind == "cfg" and not adapter.guidance_in:
        raise UsageError(
            f"{case.parallel}: {adapter.facts.id} has no two branches of guidance that two processes could share."
        )
    if kind == "cfg" and guidance <= 1:
        raise UsageError(f"{case.parallel}: guidance {guidance:g} of {adapter.facts.id} is off; expected above 1.")


def check_steps(steps: int, adapter: Adapter) -> None:
    """Refuse fewer denoise steps than the model's scheduler can lay out (UsageError)."""
    if steps < adapter.min_steps:
        raise UsageError(f"{adapter.facts.id} needs at least {adapter.min_steps} denoise steps, got {steps}.")


def dtype_of(case: Case) -> torch.dtype:
    """The torch dtype that a case names."""
    import torch

    if case.dtype not in DTYPES:
        raise UsageError(f"Unknown dtype {case.dtype!r}: expected one of {', '.join(DTYPES)}.")
    return getattr(torch, case.dtype)


def device_of(case: Case, adapter: Adapter) -> torch.device:
    """The torch device that a case names, once it is known to exist and to have enough free memory."""
    import torch

    try:
        device = torch.device(case.device)
    except RuntimeError as error:
        raise UsageError(f"Unknown device {case.device!r}: expected cuda, cuda:<index> or cpu.") from error
    if device.type != "cuda":
        return device
    text_bytes = adapter.text_encoder_bytes if case.weights == "pretrained" else 0
    needed = memory_bytes(case, adapter.facts) + text_bytes
    way_on = f"Use a GPU with {needed / GB:.0f} GB free, or {_on_a_cpu(adapter)}."
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"{adapter.facts.id} was asked for on {case.device}, and torch {torch.__version__} finds "
            f"{torch.cuda.device_count()} CUDA devices here. {way_on}"
        )
    free, total = torch.cuda.mem_get_info(device)
    if free < needed:
        raise EnvironmentFault(
            f"{adapter.facts.id} needs about {needed / GB:.1f} GB of GPU memory; {case.device} has {free / GB:.1f} of "
            f"{total / GB:.1f} GB free. {way_on}"
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _on_a_cpu(adapter: Adapter) -> str:
    """What a CPU can do instead: the tiny model that shares an adapter's pipeline, if there is one."""
    alike = (name for name in MODELS if facts(name).tiny and facts(name).pipeline == adapter.facts.pipeline)
    tiny = next(alike, None)
    return f"the tiny model: {tiny} with device cpu" if tiny else "device cpu"


def pretrained(source: str, *, adapter: Adapter, dtype: torch.dtype) -> Any:
    """The pipeline of a local folder or of a hub id, on the CPU.

    EnvironmentFault where neither the folder nor the hub nor its cache has the files.
    """
    from huggingface_hub.errors import HfHubHTTPError

    local = Path(source).is_dir()
    if local:
        _check_class(Path(source), adapter=adapter)
    try:
        return adapter.from_pretrained(source, dtype=dtype, local=local)
    except (OSError, HfHubHTTPError) as error:
        reason = str(error).strip().split("\n")[0]
        if local:
            raise EnvironmentFault(f"{source} could not be loaded: {reason}") from error
        raise EnvironmentFault(
            f"The weights of {source} are neither in the hub's local cache nor can they be downloaded. Give a local "
            "diffusers folder (as the model, or with --source), or run the same arithmetic on seeded weights with "
            f"--weights random. The hub's client says: {shorten(reason, width=160, placeholder=' ...')}"
        ) from error


def cached_tokenizer(model: str) -> Any:
    """The tokenizer of a hub id if the hub's local cache has it, else None; nothing is downloaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, subfolder="tokenizer", local_files_only=True)
    except (OSError, ValueError):
        return None


def _check_class(folder: Path, *, adapter: Adapter) -> None:
    """Refuse a folder that holds another pipeline (UsageError)."""
    index = folders.index_of(folder)
    if not adapter.fits(folder, index=index):
        raise UsageError(
            f"{folder} holds a {index.get('_class_name')}, and {adapter.facts.id} needs a {adapter.facts.pipeline}."
        )


def token_counts(case: Case, adapter: Adapter, pipe: Any, *, prompts: tuple[str, ...]) -> tuple[tuple[int, ...], str]:
    """Tokens of each prompt as they reach the transformer, counted where there is a tokenizer; and where from."""
    if getattr(pipe, "tokenizer", None) is not None:
        counts, source = tuple(adapter.count_tokens(pipe, prompt) for prompt in prompts), "tokenizer"
    elif case.token_counts is not None:
        counts, source = case.token_counts, "suite"
    else:
        counts, source = tuple(map(adapter.estimate_tokens, prompts)), "estimate"
    for prompt, tokens in enumerate(counts):
        if tokens > adapter.max_tokens:
            log.warning("prompt %d has %d tokens; %s keeps %d", prompt, tokens, adapter.facts.id, adapter.max_tokens)
    return tuple(min(tokens, adapter.max_tokens) for tokens in counts), source
