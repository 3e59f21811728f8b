"""A runner brought to life on a loaded pipeline: a hook that binds a denoiser's call, pads it by the model's policy and
hands it to the engine; and its counters. Nothing here measures or compares.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from bcgbench.binding import Arguments, Binder, Traced
from bcgbench.compiled import variant_of
from bcgbench.engine import trees
from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.options import DEFAULT
from bcgbench.engine.segments import Backend
from bcgbench.engine.signature import Signature
from bcgbench.engine.tape import backend_for
from bcgbench.models.base import Session
from bcgbench.models.padding import OutsidePolicy, PadCache
from bcgbench.runners import Runner
from bcgbench.types import Engagement, Miss
from bcgbench.unchanged import mark
from bcgbench.variant import replaced

Key = tuple[str, Signature]
"""Module and signature: one graph."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Calls of an arm so far."""

    forwards: int
    replays: int
    fallbacks: int

    def since(self, earlier: Counts) -> Counts:
        """What was counted after `earlier`."""
        return Counts(self.forwards - earlier.forwards, self.replays - earlier.replays,
                      self.fallbacks - earlier.fallbacks)  # fmt: skip


class Hook:
    """What stands in for one denoiser's forward while an arm is attached."""

    def __init__(self, module: nn.Module, *, session: Session, runner: Runner, backend: Backend | None) -> None:
        original = module.forward
        adapter, case = session.adapter, session.case
        options = DEFAULT.without(*runner.without)
        asked = BreakPolicy.parse(runner.breaks or case.break_policy) if runner.captured else None
        policy = asked.unsearched if asked is not None and runner.compiled else asked
        if policy is not None and policy != BreakPolicy():
            policy = replace(policy, names=(*policy.names, *adapter.breaks), kernels=options.kernel_breaks)
        self.variant = variant_of(runner, module, original, policy=policy)

        def forward(arguments: Arguments) -> Any:
            return adapter.forward(module, self.variant or original, arguments)

        self.forward = forward
        self.module = module
        self.weights = mark(module)
        self.original = original
        self.bind = Binder(original)
        self.share = session.share
        self.graphed = GraphedForward(forward, device=session.device, policy=policy, module=module, options=options,
                                      backend=backend)  # fmt: skip
        if asked is not None and runner.compiled and asked != asked.unsearched:
            kept = "attention" if asked.unsearched.attention else "named functions alone"
            self.graphed.chosen = f"{kept}: compiled code is not searched for breaks"
        self._adapter = adapter
        self._padded = runner.padded
        self._buckets = adapter.default_buckets if case.buckets is None else case.buckets
        self._cache = PadCache()

    def pad(self, arguments: Arguments) -> Arguments:
        """The arguments that the engine sees. Raises `OutsidePolicy`."""
        if not self._padded:
            return arguments
        return self._adapter.pad(arguments, buckets=self._buckets, cache=self._cache)

    def variants(self, arguments: Arguments) -> Iterator[Arguments]:
        """Every shape of a traced call that a warm-up captures, largest first."""
        if not self._padded:
            return iter((arguments,))
        return self._adapter.variants(arguments, buckets=self._buckets, cache=self._cache)

    def call(self, arguments: Arguments) -> Any:
        """One forward on bound arguments."""
        try:
            padded = self.pad(arguments)
        except OutsidePolicy as reason:
            self.graphed.calls += 1
            self.graphed.cache.count(str(reason))
            return self.graphed.fall_back(arguments)
        return self.graphed(padded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The denoiser's forward as the pipeline calls it."""
        return self.share(self.call, self.bind(args, kwargs))

    def explain(self, difference: tuple[str, ...]) -> tuple[str, ...]:
        """A miss's lines in the words of the model's users."""
        return self._adapter.explain(difference)

    def idle(self, output: Any) -> Hook:
        """This hook around a forward that does nothing: what is left is the hook's own cost."""
        other = copy.copy(self)
        other.share = lambda call, arguments: call(arguments)
        other.graphed = GraphedForward(lambda _: output, device=self.graphed.device, policy=None, module=self.module)
        return other


class Arm:
    """One runner on one session."""

    def __init__(self, runner: Runner, session: Session) -> None:
        self.runner = runner
        backend = backend_for(session.device, DEFAULT.without(*runner.without)) if runner.captured else None
        self._backend = backend
        self.hooks = {name: Hook(module, session=session, runner=runner, backend=backend)
                      for name, module in session.denoisers.items()}  # fmt: skip
        self.asked: set[Key] = set()
        """What the traced requests ask for, in contrast to lengths that were captured in advance."""
        self._engaged: set[Key] = set()
        """What some request replayed; a replay of the check, outside a request, is no proof."""

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """The pipeline runs through this arm until the block ends. Graphs of replaced weights are dropped first."""
        for hook in self.hooks.values():
            hook.graphed.check_weights()
        before = self._replays()
        with contextlib.ExitStack() as stack:
            if self.runner.hooked:
                for hook in self.hooks.values():
                    stack.enter_context(replaced(hook.module, hook))
                    if hook.variant is not None and not self.runner.captured:
                        stack.enter_context(hook.variant.installed())
            yield
        self._engaged |= {key for key, replays in self._replays().items() if replays > before[key]}

    def call(self, traced: Traced) -> Any:
        """This arm's output on a traced call's arguments."""
        return self.hooks[traced.module].call(traced.arguments)

    def prepare(self, calls: Iterable[Traced]) -> None:
        """Compile for and capture every signature that the calls may meet, the largest first, then freeze.

        Raises `CaptureError`; a call outside the length policy is left to a counted fallback.
        """
        calls = list(calls) if self.runner.captured or not self.runner.same_arithmetic else []
        for hook, arguments in sorted(self.shapes(calls), key=lambda item: _elements(item[1]), reverse=True):
            if hook.variant is not None:
                hook.variant.prepare(functools.partial(hook.forward, arguments))
            hook.graphed.prepare(arguments)
        self._prepare_guarded(calls)
        for hook in self.hooks.values():
            hook.graphed.freeze()
            if hook.variant is not None:
                hook.variant.settle()

    def _prepare_guarded(self, calls: Iterable[Traced]) -> None:
        """Calls of one signature need graphs of their own where the host reads different values in them."""
        for traced in calls:
            hook = self.hooks[traced.module]
            with contextlib.suppress(OutsidePolicy):
                arguments = hook.pad(traced.arguments)
                if any(graph.guarded for graph in hook.graphed.cache.find(hook.graphed.sign(arguments).signature)):
                    hook.graphed.prepare(arguments)

    def shapes(self, calls: Iterable[Traced]) -> list[tuple[Hook, Arguments]]:
        """Every distinct signature that preparation has to do with, and whose it is."""
        found: dict[Key, tuple[Hook, Arguments]] = {}
        for traced in calls:
            hook = self.hooks[traced.module]
            with contextlib.suppress(OutsidePolicy):
                # a graph for every length; without graphs only what the requests make is compiled
                every = hook.variants(traced.arguments) if self.runner.captured else [hook.pad(traced.arguments)]
                for arguments in every:
                    found.setdefault((traced.module, hook.graphed.sign(arguments).signature), (hook, arguments))
                self.asked.add((traced.module, hook.graphed.sign(hook.pad(traced.arguments)).signature))
        return list(found.values())

    @property
    def counts(self) -> Counts:
        """Calls since the arm was made."""
        graphed = [hook.graphed for hook in self.hooks.values()]
        return Counts(sum(g.calls for g in graphed), sum(g.replays for g in graphed), sum(g.fallbacks for g in graphed))

    @property
    def captures(self) -> int:
        """Graphs captured so far, those evicted since included."""
        return sum(hook.graphed.cache.captures for hook in self.hooks.values())

    def _replays(self) -> Counter[Key]:
        """Replays of each signature held."""
        held = [(name, graph) for name, hook in self.hooks.items() for graph in hook.graphed.cache.graphs]
        found: Counter[Key] = Counter()
        for name, graph in held:
            found[name, graph.signature] += graph.replays
        return found

    @property
    def graphs(self) -> list[SegmentedGraph]:
        """All graphs held."""
        return [graph for hook in self.hooks.values() for graph in hook.graphed.cache.graphs]

    @property
    def backend(self) -> Literal["cuda", "tape", "none"]:
        """What replays: "cuda", "tape", or "none"."""
        return "none" if self._backend is None else "cuda" if self._backend.name == "cuda" else "tape"

    @property
    def growth_bytes(self) -> tuple[int, ...]:
        """Growth of reserved memory per capture, in order."""
        return tuple(size for hook in self.hooks.values() for size in hook.graphed.growth_bytes)

    @property
    def pool_bytes(self) -> int:
        """Reserved by the arm's graph pools, torch's own included."""
        torchs = sum(hook.variant.pool_bytes for hook in self.hooks.values() if hook.variant is not None)
        return torchs + (self._backend.pool_bytes() if self._backend is not None else 0)

    def engagement(self, *, captures: tuple[int, ...], expected_forwards: int) -> Engagement:
        """The proof of replay over everything this arm was asked to run."""
        graphs, counts, idle = self.graphs, self.counts, self._replays().keys() - self._engaged
        largest = max(graphs, key=lambda graph: len(graph.steps), default=None)
        misses = [
            Miss(module=name, reason=miss.reason, difference=hook.explain(miss.difference), count=miss.count)
            for name, hook in self.hooks.items()
            for miss in hook.graphed.cache.misses.values()
        ]
        return Engagement(
            captures=captures,
            signatures=tuple(str(graph.signature) for graph in graphs),
            segments=largest.segments if largest else 0,
            breaks=largest.breaks if largest else 0,
            expected_forwards=expected_forwards,
            replays=counts.replays,
            fallbacks=counts.fallbacks,
            misses=tuple(misses),
            evictions=sum(hook.graphed.cache.evictions for hook in self.hooks.values()),
            uncalled=tuple(sorted(str(signature) for _, signature in idle - self.asked)),
            unengaged=tuple(sorted(str(signature) for _, signature in idle & self.asked)),
            graph_nodes=largest.nodes if largest else None,
            prepare_forwards=sum(hook.graphed.prepare_forwards for hook in self.hooks.values()),
        )


def _elements(arguments: Arguments) -> int:
    return sum(tensor.numel() for tensor in trees.tensors(arguments))
