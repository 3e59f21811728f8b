"""`GraphedForward`: a module's forward behind a graph cache. Eager and graphed arms differ only in `policy`."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.cache import GraphCache, Limits
from bcgbench.engine.capture import Forward, capture
from bcgbench.engine.choice import choose
from bcgbench.engine.diagnose import Watch
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.known import KnownCalls
from bcgbench.engine.options import DEFAULT, Options
from bcgbench.engine.segments import Backend
from bcgbench.engine.signature import Call, ambient, sign
from bcgbench.engine.steps import GuardFailed
from bcgbench.engine.tape import backend_for
from bcgbench.engine.weights import WeightPlaces
from bcgbench.errors import CaptureError, ReplayError

log = logging.getLogger(__name__)


class GraphedForward:
    """Calls `forward(arguments)` by replaying a captured graph where there is one.

    While the cache is open, `prepare` captures a signature. Once frozen, a call without a graph runs eagerly and is
    counted with its reason. With `policy=None` nothing is ever captured: the same path, eager. Forwards that run one
    after the other may have one `backend`, and then share its memory pool, as outputs are copied out of it.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        device: torch.device,
        policy: BreakPolicy | None,
        module: nn.Module | None = None,
        limits: Limits | None = None,
        options: Options = DEFAULT,
        backend: Backend | None = None,
    ) -> None:
        self.cache = GraphCache(limits or Limits())
        self.calls = 0
        self.replays = 0
        self.fallbacks = 0
        self.prepare_forwards = 0
        self.growth_bytes: list[int] = []
        self.chosen: str | None = None
        """Which form of graph the policy `best` took at the first capture, and why."""
        self._sign = KnownCalls().sign if options.known_calls else sign
        self._weights: WeightPlaces | None = None
        """Where parameters and buffers lay at the last capture."""
        self.backend: Backend | None = None if policy is None else backend or backend_for(device, options)
        self.device = device
        self._device_type = device.type
        self._forward = forward
        self._policy = policy and replace(policy, kernels=policy.kernels and options.kernel_breaks)
        self._module = module

    @property
    def auto(self) -> bool:
        """Whether breaks are found while capturing."""
        return self._policy is not None and self._policy.auto

    def sign(self, arguments: dict[str, Any]) -> Call:
        """The call's leaves and signature. Raises `SignatureError`."""
        return self._sign(arguments, ambient=ambient(self._module, self._device_type))

    def prepare(self, arguments: dict[str, Any]) -> SegmentedGraph | None:
        """Capture this call unless a graph of it is held; None for an eager arm. Raises `CaptureError`."""
        if self._policy is None or self.backend is None:
            return None
        if self.cache.frozen:
            raise CaptureError("The graph cache is frozen: capture every signature before the first measured request.")
        call = self.sign(arguments)
        held = self.serving(call)
        if held is not None:
            return held
        self.check_weights()
        before = _reserved_bytes(self.device)
        graph = self._capture_best(call, self.backend) if self._policy.best else self._capture(call, self.backend)
        grown = _reserved_bytes(self.device) - before  # before an eviction gives memory back
        self._check_pool()
        self.growth_bytes.append(grown)
        self.cache.add(graph)
        self._weights = WeightPlaces(self._module)
        return graph

    def _capture(
        self, call: Call, backend: Backend, *, policy: BreakPolicy | None = None, watch: Watch | None = None
    ) -> SegmentedGraph:
        policy = policy or self._policy
        assert policy is not None
        graph = capture(self._forward, call, backend=backend, policy=policy, module=self._module,
                        step_limit=self.cache.limits.steps, watch=watch)  # fmt: skip
        self.prepare_forwards += graph.forwards
        return graph

    def _capture_best(self, call: Call, backend: Backend) -> SegmentedGraph:
        """The first call decides for all that follow: the largest, if the caller begins with it."""
        assert self._policy is not None
        with _kept_random_state(self.device):
            choice = choose(self._policy, lambda policy, into: self._capture(call, into, policy=policy),
                            backend=backend, leaves=call.leaves)  # fmt: skip
        gc.collect()  # the form not taken goes before memory is counted
        self._policy, self.chosen = choice.policy, choice.reason
        log.info("break policy best: %s", choice.reason)
        return choice.graph or self._capture(call, backend)

    def serving(self, call: Call) -> SegmentedGraph | None:
        """The graph held for this call, by signature and guards; the latter are tried."""
        with _kept_random_state(self.device):
            return next((graph for graph in self.cache.find(call.signature) if graph.fits(call.leaves)), None)

    def check_weights(self) -> None:
        """Drop all graphs if a parameter or buffer lies elsewhere than at their capture, as they read the old place, or
        a submodule was switched.

        For once per request: 0.4 ms for 2,000 tensors, too much for every call. Values changed in place are followed by
        the graphs and need no check.
        """
        if self._weights is None or not len(self.cache):
            return
        changed = self._weights.changed()
        if changed:
            shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")  # noqa: PLR2004
            self.cache.drop_all(f"weights or switches changed after the capture ({shown}); capture again")

    def freeze(self) -> None:
        """No captures from here on."""
        self.cache.frozen = True

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """One forward: replay, or eager with a counted reason. Raises `ReplayError` if a replay fails."""
        self.calls += 1
        call = self.sign(arguments)
        if self._policy is None:
            return self._forward(arguments)
        graphs = self.cache.find(call.signature)
        if not graphs:
            self.cache.miss(call.signature)
            return self.fall_back(arguments)
        for graph in graphs:
            state = _random_state(self.device) if graph.guarded else None
            try:
                output = graph.replay(call.leaves)
            except GuardFailed as reason:
                missed = reason
                if state is not None:  # another graph, or eager, begins anew
                    _set_random_state(state, self.device)
            except ReplayError:
                if self.backend is not None:
                    self.backend.check_alive()
                raise
            else:
                self.replays += 1
                return output
        self.cache.count(str(missed), key=missed.where)
        return self.fall_back(arguments)

    def fall_back(self, arguments: dict[str, Any]) -> Any:
        """An eager call of a graphed arm; the caller has counted the reason."""
        self.fallbacks += 1
        return self._forward(arguments)

    def recapture(
        self, arguments: dict[str, Any], *, backend: Backend, watch: Watch | None = None
    ) -> tuple[SegmentedGraph, Call]:
        """Capture this call once more, apart from the cache and into `backend`; for finding a difference."""
        call = self.sign(arguments)
        return self._capture(call, backend, watch=watch), call

    def _check_pool(self) -> None:
        limit = self.cache.limits.pool_bytes
        if limit is not None and self.backend is not None and self.backend.pool_bytes() > limit:
            raise CaptureError(
                f"The graph pool holds {self.backend.pool_bytes():,} bytes, the limit is {limit:,}. Capture fewer "
                "buckets, or raise the limit."
            )


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextlib.contextmanager
def _kept_random_state(device: torch.device) -> Iterator[None]:
    state = _random_state(device)
    yield
    _set_random_state(state, device)


def _reserved_bytes(device: torch.device) -> int:
    """Reserved memory after returning what is free and what eager calls work in, so that growth is the graph's own: the
    first capture would be credited with the 34 MB of a cuBLAS workspace that it drops."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
