"""Switches turned and weights changed after the capture: a call must miss or follow, never replay what is stale."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bcgbench.arms import Arm
from bcgbench.engine import trees
from bcgbench.engine.diagnose import bit_equal
from bcgbench.errors import EngineError
from bcgbench.validate import Answer, not_applicable, ruled
from bcgbench.validate_subject import Shape, Subject

Toggle = Callable[[Subject, Shape], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def _training(subject: Subject, shape: Shape) -> Iterator[None]:
    module = subject.hook(subject.padded, shape).module
    module.train()
    try:
        yield
    finally:
        module.eval()


@contextlib.contextmanager
def _precision(subject: Subject, shape: Shape) -> Iterator[None]:
    del subject, shape
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before != "medium" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _deterministic(subject: Subject, shape: Shape) -> Iterator[None]:
    del subject, shape
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(not before, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _attention(subject: Subject, shape: Shape) -> contextlib.AbstractContextManager[Any]:
    del subject, shape
    from diffusers.models.attention_dispatch import attention_backend

    backend: contextlib.AbstractContextManager[Any] = attention_backend("_native_math")
    return backend


def _sdpa(subject: Subject, shape: Shape) -> contextlib.AbstractContextManager[Any]:
    del subject, shape
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def _autocast(subject: Subject, shape: Shape) -> contextlib.AbstractContextManager[Any]:
    del shape
    return torch.autocast(subject.device.type, dtype=torch.bfloat16)


def _inference(subject: Subject, shape: Shape) -> contextlib.AbstractContextManager[Any]:
    del subject, shape
    return torch.inference_mode()


TOGGLES: dict[str, Toggle] = {
    "autocast": _autocast,
    "training flag": _training,
    "attention backend": _attention,
    "sdpa kernels": _sdpa,
    "float32 matmul precision": _precision,
    "deterministic algorithms": _deterministic,
    "inference mode": _inference,
}
"""Switches that change what a forward computes, or how."""


def toggles(subject: Subject) -> Answer:
    """Each switch turned around a call: equal to eager under the same switch, by a miss; and nothing stays behind."""
    arm, problems, refused = subject.arm(), [], []
    shape = subject.shapes[0]
    base = subject.eager(shape)
    graphed = subject.hook(arm, shape).graphed
    for name, toggle in TOGGLES.items():
        # a switch that the model was not written for may make torch warn
        with warnings.catch_warnings(action="ignore"), toggle(subject, shape):
            try:
                expected = subject.eager(shape)
            except RuntimeError as error:
                refused.append(f"{name}: eager refuses it ({type(error).__name__})")
                continue
            replays = graphed.replays
            try:
                unlike = subject.unlike(expected, graphed(shape.arguments))
            except EngineError as error:
                unlike = f"replayed, and raised {type(error).__name__}: {error}"
        stale = " (a stale replay)" if graphed.replays > replays else ""
        problems += [f"{name}: {unlike}{stale}"] if unlike else []
        replays = graphed.replays
        unlike = subject.unlike(base, graphed(shape.arguments))
        if unlike or graphed.replays == replays:
            problems.append(f"{name}, turned back: {unlike or 'its graph is not found any more'}")
    problems += _collisions(subject, arm)
    fine = f"{len(TOGGLES) - len(refused)} switches: each call misses or follows; no dtypes or constants collide"
    return ruled(problems, fine=fine, details=refused)


def _collisions(subject: Subject, arm: Arm) -> Iterator[str]:
    """Arguments of another dtype, and constants that Python calls equal: no graph may be found for them."""
    for shape in subject.shapes:
        graphed = subject.hook(arm, shape).graphed
        leaves, spec = trees.flatten(shape.arguments)
        for index, path in enumerate(trees.paths(spec)):
            other = _other_type(leaves[index])
            if other is None:
                continue
            asked = graphed.sign(trees.rebuild(spec, [*leaves[:index], other, *leaves[index + 1 :]]))
            if graphed.cache.find(asked.signature):
                yield f"{path}: {trees.describe(other)} finds the graph of {trees.describe(leaves[index])}"


def _other_type(leaf: Any) -> Any:
    """An argument that compares equal and is not the same, or a tensor of another dtype."""
    if isinstance(leaf, Tensor):
        return leaf.to(torch.float32 if leaf.dtype != torch.float32 else torch.float64)
    if isinstance(leaf, bool):
        return int(leaf)
    return float(leaf) if isinstance(leaf, int) else -leaf if isinstance(leaf, float) and leaf == 0 else None


Change = Callable[[nn.Module, str], contextlib.AbstractContextManager[None]]
"""Of the denoiser, by the path of a linear layer in it."""


def weights(subject: Subject) -> Answer:
    """A weight changed in place must be followed; new storage, a new or a switched module seen at the next request."""
    found = _moving_weight(subject)
    if found is None:
        return not_applicable("none of the denoiser's last linear layers can be scaled in place and changes its output")
    shape, name = found
    problems, told = [], []
    for what, change in CHANGES.items():
        arm = subject.arm()
        with change(subject.hook(arm, shape).module, name):
            expected = subject.eager(shape)
            replays = arm.counts.replays
            with arm.attached():
                got = subject.hook(arm, shape).graphed(shape.arguments)
        followed = arm.counts.replays > replays
        told.append(f"{what}: {'followed' if followed else 'graphs dropped'}")
        unlike = subject.unlike(expected, got)
        if followed and what in MUST_DROP:
            unlike = unlike or "nothing was dropped"
        if unlike:
            problems.append(f"{name} {what}: {unlike}{' (a stale replay)' if followed else ''}")
    return ruled(problems, fine=f"{name} {', '.join(told)}")


def _moving_weight(subject: Subject) -> tuple[Shape, str] | None:
    """The last linear layer whose weight the output of a call depends on."""
    for shape in subject.shapes:
        base, root = subject.eager(shape), subject.hook(subject.padded, shape).module
        names = [name for name, each in root.named_modules() if isinstance(each, nn.Linear)]
        for name in reversed(names[-4:]):
            with _in_place(root, name):
                moved = subject.eager(shape)
            if not all(bit_equal(a, b) for a, b in zip(trees.tensors(base), trees.tensors(moved), strict=True)):
                return shape, name
    return None


def _linear(root: nn.Module, name: str) -> nn.Linear:
    layer = root.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


@contextlib.contextmanager
def _in_place(root: nn.Module, name: str) -> Iterator[None]:
    layer = _linear(root, name)
    old = layer.weight.detach().clone()
    layer.weight.mul_(1.5)
    try:
        yield
    finally:
        layer.weight.copy_(old)


@contextlib.contextmanager
def _new_storage(root: nn.Module, name: str) -> Iterator[None]:
    layer = _linear(root, name)
    old = layer.weight.data
    layer.weight.data = old * 1.5
    try:
        yield
    finally:
        layer.weight.data = old


@contextlib.contextmanager
def _new_parameter(root: nn.Module, name: str) -> Iterator[None]:
    layer = _linear(root, name)
    old = layer.weight
    layer.weight = nn.Parameter(old.detach() * 1.5, requires_grad=False)
    try:
        yield
    finally:
        layer.weight = old


class _Adapted(nn.Module):
    """A linear layer with a low-rank part added, as a LoRA loads it: it takes the layer's place."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        ones = torch.ones(layer.in_features, 1, dtype=layer.weight.dtype, device=layer.weight.device)
        self.down = nn.Parameter(ones / layer.in_features, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.layer(x), x @ self.down)


@contextlib.contextmanager
def _adapted(root: nn.Module, name: str) -> Iterator[None]:
    layer, (parent, _, own) = _linear(root, name), name.rpartition(".")
    setattr(root.get_submodule(parent), own, _Adapted(layer).eval())
    try:
        yield
    finally:
        setattr(root.get_submodule(parent), own, layer)


@contextlib.contextmanager
def _in_training(root: nn.Module, name: str) -> Iterator[None]:
    layer = _linear(root, name)
    layer.train()
    try:
        yield
    finally:
        layer.eval()


CHANGES: dict[str, Change] = {
    "written in place": _in_place, "with new storage": _new_storage, "as a new parameter": _new_parameter,
    "behind an adapter": _adapted, "in training mode": _in_training,
}  # fmt: skip
MUST_DROP = frozenset({"in training mode"})
"""Changes that a linear layer's output does not show; another layer's would."""
