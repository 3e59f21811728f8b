"""What an adapter knows of a model, and a session: a loaded pipeline with the requests of one case.

Loading is the same for every model and stands here; names of arguments, length policies and sizes stand in the model's
own file. Nothing here captures, measures or compares.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bcgbench.models import adapter as find_adapter
from bcgbench.models import loading, media
from bcgbench.models import prior as priors
from bcgbench.models.padding import PadCache

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

    from bcgbench.models.weights import Builder
    from bcgbench.types import Case, ModelFacts

Arguments = dict[str, Any]
Share = Callable[[Callable[[Arguments], Any], Arguments], Any]
"""(denoiser's call, its arguments) -> the whole call's output, of which several processes may run parts."""
Draw = Callable[[int, int], "Tensor"]
"""(tokens, stream) -> seeded embeddings [1, tokens, width]. Stream 0 is the negative prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A diffusers class by name, and its configuration."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Everything that is particular to a model. Subclasses override the methods in which theirs differs."""

    facts: ModelFacts
    networks: Mapping[str, Component]
    """Denoisers and VAE by pipeline argument, at the configuration of the release or of the tiny model."""
    scheduler: Component
    text_width: int
    """Width of the prompt embeddings."""
    max_tokens: int
    """Prompt tokens that reach the transformer at most; the pipeline cuts longer prompts."""
    template_tokens: int
    """Tokens that the chat template adds to a prompt."""
    min_steps: int = 1
    """Fewest denoise steps that the scheduler can lay out."""
    text_encoder_bytes: int = 0
    """bf16 size of the text encoder, which only pretrained weights load."""
    breaks: tuple[str, ...] = ()
    """Dotted names that must run between graphs, whatever else breaks; the whole graph has none."""
    text_parts: tuple[str, ...] = ("tokenizer", "text_encoder")
    """Pipeline arguments that turn a prompt into the denoiser's inputs: None with synthetic prompts."""
    unused_parts: tuple[str, ...] = ()
    """Pipeline arguments that no request needs; pretrained pipelines are loaded without them."""
    guidance_in: Literal["", "batch", "calls"] = ""
    """Where `cfg:2` finds guidance's branches: rows of a call, or one call each in turn; "" where there are none."""
    rewriter: tuple[str, ...] = ()
    """Parts of the pipeline that `rewrite` needs; () where the model has no rewriting of its own."""

    @property
    def default_buckets(self) -> tuple[int, ...]:
        """Prompt-length buckets of the model's own policy; () where it has none."""
        return self.facts.buckets

    def denoisers(self, pipe: Any) -> dict[str, nn.Module]:
        """The modules to capture, by attribute name of the pipeline."""
        return {"transformer": pipe.transformer}

    def pad(self, arguments: Arguments, *, buckets: tuple[int, ...], cache: PadCache) -> Arguments:
        """A call's arguments padded by the length policy, or the same object where the policy changes nothing.

        `arguments` are the forward's by name, defaults filled. OutsidePolicy where the policy has no shape for them.
        """
        del buckets, cache
        return arguments

    def variants(self, arguments: Arguments, *, buckets: tuple[int, ...], cache: PadCache) -> Iterator[Arguments]:
        """One traced call in every shape that the policy may meet, largest first: what a warm-up captures."""
        yield self.pad(arguments, buckets=buckets, cache=cache)

    def forward(self, module: nn.Module, original: Callable[..., Any], arguments: Arguments) -> Any:
        """Run padded arguments: the callable to capture. Does no host read and no copy from the host of its own."""
        del module
        return original(**arguments)

    def fits(self, folder: Path, *, index: Mapping[str, Any]) -> bool:
        """Whether this adapter can drive a local diffusers folder; `index` is its model_index.json."""
        del folder
        return index.get("_class_name") == self.facts.pipeline

    def from_pretrained(self, source: str, *, dtype: torch.dtype, local: bool) -> Any:
        """The pipeline of a local folder or of a hub id, on the CPU; raises what diffusers and its hub client raise."""
        from diffusers import DiffusionPipeline

        unused = dict.fromkeys(self.unused_parts)
        return DiffusionPipeline.from_pretrained(source, dtype=dtype, local_files_only=local, **unused)

    def prepare_pipeline(self, pipe: Any) -> None:
        """Change a loaded pipeline, for all arms alike."""

    def tiny_text(self) -> dict[str, Any]:
        """The `text_parts` of the tiny model, by pipeline argument; a part left out is None."""
        raise NotImplementedError

    def assemble(self, build: Builder) -> Any:
        """A pipeline with seeded random weights; only a tiny one has a tokenizer and a text encoder."""
        import diffusers
        from torch import nn

        parts = {name: build.model(part.kind, part.config, name=name) for name, part in self.networks.items()}
        scheduler = getattr(diffusers, self.scheduler.kind)(**self.scheduler.config)
        text: dict[str, Any] = dict.fromkeys(self.text_parts)
        if self.facts.tiny:
            text |= self.tiny_text()
        for part in text.values():
            if isinstance(part, nn.Module):
                part.to(build.device, build.dtype)
        return getattr(diffusers, self.facts.pipeline)(**parts, **text, scheduler=scheduler)

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Arguments of the pipeline besides prompt, steps, generator and output type."""
        del guidance
        return {"width": case.width_px, "height": case.height_px}

    def sized(self, case: Case, *, tokens: int, steps: int) -> Arguments:
        """Arguments that follow a prompt's tokens or the number of steps, where the pipeline leaves them to its caller.

        All arms get the same.
        """
        del case, tokens, steps
        return {}

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """Arguments that carry a prompt as text, with a negative prompt where guidance needs one."""
        raise NotImplementedError

    def embeddings(self, draw: Draw, *, tokens: int, stream: int, guidance: float) -> Arguments:
        """Arguments that carry a prompt of `tokens` tokens as embeddings, in place of `text`."""
        raise NotImplementedError

    def drawn(self, pipe: Any, case: Case, *, prompt: int) -> Arguments:
        """Tensor arguments sampled from the case's seed before denoising; drawn once per prompt, shared by all arms."""
        del pipe, case, prompt
        return {}

    def sampler(self, pipe: Any) -> str:
        """What samples in `drawn`, for the record."""
        raise NotImplementedError

    def rewrite(self, pipe: Any, prompt: str, *, case: Case, generator: torch.Generator) -> str:
        """The prompt as the model rewrites it; torch's global generators are seeded like `generator`."""
        raise NotImplementedError

    def count_tokens(self, pipe: Any, prompt: str) -> int:
        """Tokens of a prompt as they reach the transformer, before the pipeline's limit."""
        return len(pipe.tokenizer(prompt).input_ids)

    def estimate_tokens(self, prompt: str) -> int:
        """Tokens without a tokenizer: one per word and punctuation mark, plus the template. An estimate."""
        return len(re.findall(r"\w+|[^\w\s]", prompt)) + self.template_tokens

    def pixels(self, output: Any) -> np.ndarray:
        """Images of a pipeline's output, float in [0, 1], (images or frames, height, width, 3)."""
        return output.images

    def audio(self, output: Any, *, pipe: Any) -> media.Sound | None:
        """The sound beside the frames; None where the model makes none."""
        del output, pipe
        return None

    def explain(self, difference: tuple[str, ...]) -> tuple[str, ...]:
        """The lines of a miss, in the words of a user of this model where the forward's own names say too little."""
        return difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A loaded pipeline and the case whose prompts it serves."""

    adapter: Adapter
    pipe: Any
    case: Case
    device: torch.device
    dtype: torch.dtype
    synthetic: bool
    """Weights are random and prompts are seeded embeddings."""
    token_counts: tuple[int, ...]
    """Tokens of each prompt as they reach the transformer."""
    token_source: str
    """Where they come from: "tokenizer", else "suite", else "estimate"."""
    load_s: float
    weights_bytes: int
    denoisers: dict[str, nn.Module]
    prior: priors.Prior
    """Everything random, shared by all arms."""
    share: Share = lambda call, arguments: call(arguments)

    def request(self, prompt: int, *, steps: int | None = None) -> Arguments:
        """Fresh arguments for `pipe(...)`: same seed, same noise, whatever ran before and on whatever device.

        `steps` in place of the case's; UsageError where the scheduler cannot lay out so few.
        """
        import torch

        case, adapter = self.case, self.adapter
        steps = case.steps if steps is None else steps
        loading.check_steps(steps, adapter)
        guidance = adapter.facts.guidance if case.guidance is None else case.guidance
        tokens = self.token_counts[prompt]
        if self.synthetic:
            text = adapter.embeddings(self._draw, tokens=tokens, stream=prompt + 1, guidance=guidance)
        else:
            text = adapter.text(self.prior.prompts[prompt], guidance=guidance)
        return {
            **adapter.options(case, guidance=guidance),
            **adapter.sized(case, tokens=tokens, steps=steps),
            **text,
            **self.prior.sampled[prompt],
            "num_inference_steps": steps,
            "generator": torch.Generator("cpu").manual_seed(self.prior.seed),
            "output_type": "np",
        }

    def produce(self, prompt: int, *, steps: int | None = None) -> media.Media:
        """Run the pipeline on one prompt: frames, checked for their size, and sound where the model makes any."""
        request = self.request(prompt, steps=steps)
        with self.prior.applied(prompt, whole=steps in (None, self.case.steps)):
            output = self.pipe(**request)
        return media.collect(output, pipe=self.pipe, adapter=self.adapter, case=self.case)

    def generate(self, prompt: int, *, steps: int | None = None) -> np.ndarray:
        """The frames of `produce`: uint8 (images or frames, height, width, 3)."""
        return self.produce(prompt, steps=steps).images

    def _draw(self, tokens: int, stream: int) -> Tensor:
        """Embeddings of unit variance: every transformer here normalises them first, so the scale does not matter."""
        import torch

        generator = torch.Generator("cpu").manual_seed(self.prior.seed * 1_000_003 + stream)
        drawn = torch.randn((1, tokens, self.adapter.text_width), generator=generator)
        return drawn.to(self.device, self.dtype)


def load(case: Case) -> Session:
    """Load a case's pipeline onto its device, in eval mode, with frozen weights and no progress bar.

    UsageError for an impossible combination, EnvironmentFault for what this machine lacks.
    """
    import torch

    from bcgbench.models import weights

    adapter = find_adapter(case.model)
    loading.check(case, adapter)
    if case.rewrite_prompts:
        adapter = replace(adapter, unused_parts=())
    device, dtype, seed = loading.device_of(case, adapter), loading.dtype_of(case), priors.seed_of(case)
    began = time.perf_counter()
    torch.manual_seed(seed)
    random = case.weights == "random" and not adapter.facts.tiny
    synthetic = random and not adapter.facts.generic
    source = case.source or (None if random or adapter.facts.tiny else case.model)
    if source is not None:
        pipe = loading.pretrained(source, adapter=adapter, dtype=dtype)
    elif random:
        pipe = adapter.assemble(weights.Builder(device=device, dtype=dtype, seed=seed))
    else:  # built on the CPU, so that a tiny model has the same weights on every device
        torch.set_num_threads(1)  # on tensors this small threads only wait for each other
        pipe = adapter.assemble(weights.Builder(device=torch.device("cpu"), dtype=dtype, seed=seed))
    pipe.to(device)
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    for module in modules:
        module.eval().requires_grad_(requires_grad=False)
    if synthetic and case.token_counts is None:  # given counts are the lengths to run, on every machine
        pipe.register_modules(tokenizer=loading.cached_tokenizer(case.model))
    adapter.prepare_pipeline(pipe)
    pipe.set_progress_bar_config(disable=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    load_s = time.perf_counter() - began
    prior = priors.prior_of(case, adapter, pipe, device=device)
    token_counts, token_source = loading.token_counts(case, adapter, pipe, prompts=prior.prompts)
    return Session(
        adapter=adapter, pipe=pipe, case=case, device=device, dtype=dtype, synthetic=synthetic,
        token_counts=token_counts, token_source=token_source, load_s=load_s,
        weights_bytes=weights.count_bytes(modules), denoisers=adapter.denoisers(pipe), prior=prior,
    )  # fmt: skip
