"""Checks of one forward from inside: what it asks of the host, and its graph step by step with a limit in time."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcgbench.engine import diagnose, trees
from bcgbench.engine.constants import HOST_READ_OPS, MAKERS, FunctionWatch, is_dynamic, is_read
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.regions import Region
from bcgbench.engine.signature import Call
from bcgbench.engine.steps import Break, Guard, GuardFailed
from bcgbench.errors import ProcessPoisoned
from bcgbench.validate import Answer, ruled
from bcgbench.validate_subject import Subject

STEP_LIMIT_S = 60.0
"""A step that takes longer hangs: the slowest forward of all models takes seconds."""
_SYNCHRONISING = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"))

Found = Counter[str]
"""What a forward asks of the host -> how often."""


class _Audit(TorchDispatchMode):
    """Notes host reads, host copies and shapes that depend on data, with where the model asks for them."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Found = Counter()
        self._root, self._device = root, device
        self._inside = False

    def note(self, kind: str, name: str) -> None:
        self.found[f"{kind}: {name} in {diagnose.call_site(self._root)}"] += 1

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch call as Python wrote it."""
        name = getattr(function, "__name__", str(function))
        given = trees.tensors((args, kwargs))
        on_device = any(tensor.device.type == self._device.type for tensor in given)
        if not self._inside and on_device and is_read(function, args, kwargs):
            self.note("host read", name)
            return self._within(function, args, kwargs)
        result = function(*args, **kwargs)
        if function in MAKERS and isinstance(result, Tensor) and self._from_host(given, result):
            self.note("host copy", name)
        return result

    def _from_host(self, given: list[Tensor], result: Tensor) -> bool:
        """Whether a call made a tensor of the device out of host data; on a CPU only Python's own data is such."""
        if self._device.type == "cpu":
            return not given
        return result.device.type != "cpu" and all(tensor.device.type == "cpu" for tensor in given)

    def _within(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        on_device = any(tensor.device.type == self._device.type for tensor in trees.tensors((args, kwargs)))
        if not self._inside and on_device:
            to_host = name == "aten::_to_copy" and str(kwargs.get("device")) == "cpu" and self._device.type != "cpu"
            if name in HOST_READ_OPS or to_host:
                self.note("host read", name)
            elif is_dynamic(func, args):
                self.note("shape depends on data", name)
        return func(*args, **kwargs)


def audit(run: Callable[[], object], *, root: nn.Module, device: torch.device) -> Found:
    """Host reads, host copies, data-dependent shapes, synchronising calls and compilations of `run()`."""
    seen = _Audit(root, device)
    compiled = _compilations()
    with FunctionWatch(seen.function), seen, _synchronising(seen):
        run()
    if (more := _compilations() - compiled) > 0:
        seen.found["compilation: torch.compile frames"] += more
    return seen.found


@contextlib.contextmanager
def _synchronising(seen: _Audit) -> Iterator[None]:
    """Calls that wait for the device noted until the block ends."""
    with contextlib.ExitStack() as stack:
        for owner, name in _SYNCHRONISING:
            original = getattr(owner, name)

            def wait(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                seen.note("synchronise", getattr(original, "__qualname__", "synchronize"))
                return original(*args, **kwargs)

            setattr(owner, name, wait)
            stack.callback(setattr, owner, name, original)
        yield


def _compilations() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])


def host_audit(subject: Subject) -> Answer:
    """What one eager forward asks of the host, and what a replay of it asks more often."""
    arm, problems, details = subject.arm(), [], []
    seen: set[str] = set()
    for traced in subject.samples:
        key = f"{traced.module} {subject.signature(traced)}"
        if key in seen:
            continue
        seen.add(key)
        hook = arm.hooks[traced.module]
        arm.call(traced)  # pads are made and inputs copied
        native = subject.padded.hooks[traced.module]
        eager = audit(lambda: native.graphed.fall_back(traced.arguments), root=hook.module, device=subject.device)  # noqa: B023 - run at once
        replay = audit(lambda: arm.call(traced), root=hook.module, device=subject.device)  # noqa: B023 - run at once
        details += [f"eager, {count}x {what}" for what, count in eager.items()]
        details += [f"replay, {count}x {what}" for what, count in replay.items()]
        if replay.total() > eager.total():
            more = "; ".join(f"{count}x {what}" for what, count in replay.items())
            problems.append(
                f"a replay of {traced.module} asks the host {replay.total()} times, eager {eager.total()}: {more}"
            )
    graphs = arm.graphs
    guards = [step.where for graph in graphs for step in graph.steps if isinstance(step, Guard)]
    details += [f"step that waits for the device: {where}" for where in dict.fromkeys(guards)]
    fine = (
        f"{len(seen)} forwards: a replay asks the host no more than eager does; {len(guards)} host reads left as guards"
    )
    return ruled(list(dict.fromkeys(problems)), fine=fine, details=tuple(dict.fromkeys(details)))


def steps(subject: Subject) -> Answer:
    """Every graph replayed step by step, the device synchronised after each, by a thread that may not take too long."""
    arm, problems, count = subject.arm(), [], 0
    for index, shape in enumerate(subject.shapes):
        graph = subject.graph(arm, shape)
        expected, call = subject.eager(shape), subject.hook(arm, shape).graphed.sign(shape.arguments)
        count += len(graph.steps)
        walk = _Walk(subject, graph, call)
        fault = walk.run(limit_s=STEP_LIMIT_S)
        if walk.hangs:
            raise ProcessPoisoned(f"signature {index} of {shape.module}: {fault}")
        if not fault:
            fault = subject.unlike(expected, walk.output)
        problems += [f"signature {index} of {shape.module}: {fault}"] if fault else []
    fine = f"{count} steps of {len(subject.shapes)} graphs, each synchronised, within {STEP_LIMIT_S:.0f} s, exact"
    return ruled(problems, fine=fine)


class _Walk:
    """One replay, step by step, in a thread of its own: a thread that hangs can be reported, not ended."""

    def __init__(self, subject: Subject, graph: SegmentedGraph, call: Call) -> None:
        self._subject, self._graph, self._call = subject, graph, call
        self._reached = 0
        self._moved = threading.Event()
        self._error: BaseException | None = None
        self.hangs = False
        self.output: Any = None

    def run(self, *, limit_s: float) -> str:
        """What went wrong and where; "" for nothing."""
        thread = threading.Thread(target=self._walk, name="validate-steps", daemon=True)
        thread.start()
        while thread.is_alive():
            self._moved.clear()
            reached = self._reached
            if not self._moved.wait(limit_s) and thread.is_alive() and reached == self._reached:
                self.hangs = True
                return f"no end after {limit_s:g} s of {self._place()}"
            thread.join(0.0 if self._reached <= len(self._graph.steps) else limit_s)
        if self._error is None:
            return ""
        return f"{type(self._error).__name__} in {self._place()}: {str(self._error).splitlines()[0]}"

    def _walk(self) -> None:
        device = self._subject.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        try:
            with torch.no_grad(), on_device:
                self._graph.inputs.update(self._call.leaves)
                for step in self._graph.steps:
                    step.replay()
                    self._subject.synchronize()
                    self._reached += 1
                    self._moved.set()
                output = self._graph.result()
                self.output = trees.clone(output)
                self._subject.replays += 1
        except (Exception, GuardFailed) as error:  # noqa: BLE001 - a break is anybody's code; told by `run`
            self._error = error
        finally:
            self._reached += 1
            self._moved.set()

    def _place(self) -> str:
        """Number and kind of the step that was running, between which breaks it stands."""
        steps = self._graph.steps
        at = min(self._reached - (self._error is not None), len(steps) - 1)
        if isinstance(steps[at], (Break, Region)):
            return f"step {at + 1} of {len(steps)}, the break {_label(steps[at])}"
        if isinstance(steps[at], Guard):
            return f"step {at + 1} of {len(steps)}, the host read {_label(steps[at])}"
        before = next((_label(step) for step in reversed(steps[:at]) if _label(step)), "the beginning")
        after = next((_label(step) for step in steps[at + 1 :] if _label(step)), "the end")
        return f"step {at + 1} of {len(steps)}, the segment between {before} and {after}"


def _label(step: Any) -> str:
    return step.label if isinstance(step, (Break, Region)) else step.where if isinstance(step, Guard) else ""
