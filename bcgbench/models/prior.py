"""The prior of a case: all that is random in its requests, drawn once, shared by every arm, saved and replayed.

Three kinds: prompts that the model rewrites, what an adapter samples before denoising (GLM-Image's tokens), and the
noise: every draw from a request's generator, in order. Replayed, the seed of random weights and of synthetic prompts is
the file's too. Here: drawing, recording, saving, reading. Not here: how a model samples (its adapter).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcgbench.errors import UsageError
from bcgbench.models import draws

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bcgbench.models.base import Adapter
    from bcgbench.types import Case

log = logging.getLogger(__name__)

METADATA = "bcgbench.prior"
NOISE = "noise"
DIGEST_DIGITS = 16


@dataclass(slots=True, kw_only=True)
class Prior:
    """What was sampled for the prompts of one case. Complete after the first whole request of each prompt."""

    seed: int
    """Of the request's generator, of random weights and of synthetic prompts."""
    prompts: tuple[str, ...]
    """The prompts that the arms get: the case's, or what the model made of them."""
    rewritten: bool = False
    sampled: tuple[dict[str, Tensor], ...] = ()
    """Per prompt, pipeline arguments that the adapter sampled."""
    sampler: str = ""
    """What sampled them, where anything was."""
    noise: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Per prompt, the draws of a request in order, on the host."""
    replayed: bool = False
    """Whether all this comes from a file."""

    @contextmanager
    def applied(self, prompt: int, *, whole: bool) -> Iterator[None]:
        """Around the pipeline's call: a replayed prior replaces its draws, else a prompt's first request keeps them.

        Later requests, those that are measured, run as they are. One of fewer steps (not `whole`) may draw less and is
        not kept. UsageError at a draw that a replayed prior does not hold in this shape and dtype.
        """
        if self.replayed:
            with draws.patched(draws.Server(self.noise[prompt])):
                yield
        elif prompt in self.noise or not whole:
            yield
        else:
            recorder = draws.Recorder()
            with draws.patched(recorder):
                yield
            self.noise[prompt] = recorder.finish()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the name that they have in a file: `<prompt>.<argument>` and `<prompt>.noise.<draw>`."""
        named = {f"{n}.{name}": value for n, parts in enumerate(self.sampled) for name, value in parts.items()}
        return named | {f"{n}.{NOISE}.{i}": value for n, noise in self.noise.items() for i, value in enumerate(noise)}

    @property
    def digest(self) -> str:
        """Digest of tensors and rewritten prompts: equal digests are equal priors, whatever seed they came from."""
        from bcgbench import fidelity

        parts: dict[str, Any] = {name: fidelity.digest(value) for name, value in self.tensors.items()}
        if self.rewritten:
            parts["prompts"] = self.prompts
        return "sha256:" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:DIGEST_DIGITS]

    @property
    def settings(self) -> dict[str, str]:
        """What a record says of its prior: the digest, and what it holds; nothing before anything was recorded."""
        if not self.noise:
            return {}
        kinds: dict[str, list[str]] = {}
        for name, value in self.tensors.items():
            shape = "x".join(map(str, value.shape)) or "scalar"
            kinds.setdefault(name.split(".")[1], []).append(f"{shape} {str(value.dtype).removeprefix('torch.')}")
        texts = [f"{name} {', '.join(dict.fromkeys(shapes))}" for name, shapes in kinds.items()]
        texts += ["rewritten prompts"] if self.rewritten else []
        texts += [self.sampler] if self.sampler else []
        texts += [f"seed {self.seed}"]
        return {"prior": self.digest, "prior holds": "; ".join(texts)}


# --- drawing, saving, reading ---------------------------------------------------------------------------------------


def seed_of(case: Case) -> int:
    """The seed of a case: its own, or that of the prior that it replays."""
    return case.seed if case.prior is None else _read_about(case.prior)["seed"]


def prior_of(case: Case, adapter: Adapter, pipe: Any, *, device: torch.device) -> Prior:
    """The prior that the case replays, else one drawn now, still without noise."""
    if case.prior is not None:
        return _read(case.prior, device=device)
    prompts = _rewritten(case, adapter, pipe, device=device) if case.rewrite_prompts else case.prompts
    sampled = tuple(adapter.drawn(pipe, case, prompt=prompt) for prompt in range(len(prompts)))
    sampler = adapter.sampler(pipe) if any(sampled) else ""
    return Prior(seed=case.seed, prompts=prompts, rewritten=case.rewrite_prompts, sampled=sampled, sampler=sampler)


def _rewritten(case: Case, adapter: Adapter, pipe: Any, *, device: torch.device) -> tuple[str, ...]:
    missing = [name for name in adapter.rewriter if getattr(pipe, name, None) is None]
    if missing:
        raise UsageError(
            f"Rewriting prompts needs {', '.join(missing)}, which these weights of {adapter.facts.id} lack. Use a "
            "folder that holds it, or give the rewritten text with --prompt."
        )
    made = []
    for prompt in case.prompts:
        with draws.sampling(device, seed=case.seed) as generator:
            made.append(adapter.rewrite(pipe, prompt, case=case, generator=generator))
    return tuple(made)


def check(case: Case, adapter: Adapter) -> None:
    """Refuse a prior that is not of this case, and rewriting where nothing can rewrite (UsageError). No torch."""
    if case.rewrite_prompts and case.prior is None:
        if not adapter.rewriter:
            raise UsageError(f"{adapter.facts.id} has no prompt rewriting of its own: leave rewrite_prompts out.")
        if case.weights == "random" and not adapter.facts.tiny:
            raise UsageError("Rewriting prompts needs the text encoder, which random weights have not: leave it out.")
    if case.prior is None:
        return
    about = _read_about(case.prior)
    got = (about["model"], about["resolution"], len(about["prompts"]))
    wanted = (case.model, case.resolution, len(case.prompts))
    if got != wanted:
        raise UsageError(
            f"{case.prior} is the prior of {_described(*got)}, and the case is {_described(*wanted)}. Give the prior "
            "of such a run, or leave prior out to draw one."
        )
    if about["bound"] and tuple(about["prompts"]) != case.prompts:
        raise UsageError(
            f"{case.prior} was sampled for other prompts: {', '.join(map(repr, about['prompts']))}. Give these, or "
            "leave prior out to draw one."
        )
    if case.rewrite_prompts and about["rewritten"] is None:
        raise UsageError(f"{case.prior} holds no rewritten prompts: leave out rewrite_prompts, or prior.")


def _described(model: str, resolution: str, prompts: int) -> str:
    return f"{model} at {resolution} with {prompts} prompts"


def save(prior: Prior, folder: Path, *, case: Case) -> dict[str, str]:
    """Write the prior to `folder`/artifacts; returns {"prior": path relative to the folder}, {} if there is none.

    Size: bytes of a request's noise and sampled tokens, times the prompts. Latents of an image at 1024x1024 with 16
    channels in float32 are 1 MB. A full disk costs the file, which the log says.
    """
    from bcgbench import fidelity

    if not prior.noise:
        return {}
    about = {
        "model": case.model, "resolution": case.resolution, "prompts": case.prompts, "seed": prior.seed,
        "steps": case.steps, "dtype": case.dtype, "rewritten": prior.prompts if prior.rewritten else None,
        "sampler": prior.sampler, "bound": prior.rewritten or any(prior.sampled),
    }  # fmt: skip
    path = f"artifacts/{case.key}-prior.safetensors"
    try:
        fidelity.save_latents(prior.tensors, folder / path, metadata={METADATA: json.dumps(about)})
    except OSError as error:
        log.warning("the prior was not written: %s", error)
        return {}
    return {"prior": path}


def _read_about(path: str) -> dict[str, Any]:
    """What a file says of itself. UsageError where it is missing or no prior."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            about = (file.metadata() or {}).get(METADATA)
    except (OSError, SafetensorError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UsageError(f"The prior {path} {reason}. A run keeps its own as artifacts/*-prior.safetensors.") from error
    if about is None:
        raise UsageError(f"{path} is no prior. A run keeps its own as artifacts/*-prior.safetensors.")
    return json.loads(about)


def _read(path: str, *, device: torch.device) -> Prior:
    from safetensors.torch import load_file

    about = _read_about(path)
    sampled: list[dict[str, Tensor]] = [{} for _ in about["prompts"]]
    noise: dict[int, dict[int, Tensor]] = {n: {} for n in range(len(sampled))}
    for name, value in load_file(path).items():
        prompt, argument, *index = name.split(".")
        if argument == NOISE:
            noise[int(prompt)][int(index[0])] = value
        else:
            sampled[int(prompt)][argument] = value.to(device)
    return Prior(
        seed=about["seed"], prompts=tuple(about["rewritten"] or about["prompts"]),
        rewritten=about["rewritten"] is not None, sampled=tuple(sampled), sampler=about["sampler"],
        noise={n: tuple(found[i] for i in sorted(found)) for n, found in noise.items()}, replayed=True,
    )  # fmt: skip
