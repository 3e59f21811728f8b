"""Host values met inside a forward: what a graph would freeze without a word, or refuse.

A host constant turned into a device tensor (`torch.tensor(list, device=...)`, `cpu_tensor.to("cuda")`) is the commonest
capture blocker in diffusers. It is made once, in a rehearsal, kept, and served to the capturing call in the same order;
values must be the same both times. A host read (`item`, `tolist`, `bool`) is a guard: see `graph.Guard`.

`torch.as_tensor(int, device="cuda")` does not pass a TorchDispatchMode; a TorchFunctionMode sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bcgbench.engine import diagnose, trees
from bcgbench.engine.signature import Signature, sign
from bcgbench.errors import CaptureError

MAKERS: frozenset[Any] = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.to, Tensor.cuda})
"""Calls that can turn host data into a device tensor; `Tensor.new_tensor` is seen as `torch.tensor`."""
READS: frozenset[Any] = frozenset({Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__,
                                   Tensor.__int__, Tensor.__float__, Tensor.__index__,
                                   torch.is_nonzero, Tensor.is_nonzero, torch.equal, Tensor.equal,
                                   torch.allclose, Tensor.allclose, torch.nonzero, Tensor.nonzero})  # fmt: skip
"""Calls whose result the host sees. `tolist` and `numpy` of a CPU tensor do not pass a TorchDispatchMode."""

BUILDERS: frozenset[Any] = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""Calls that read the tensors in a list element by element, where no TorchDispatchMode sees it."""

HOST_READ_OPS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
"""Operations that copy device data to the host by themselves, met below Python (for example in `range(tensor)`)."""
_MASKABLE = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations whose work depends on data if an index is a mask."""


def is_dynamic(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape of an ATen operation's result, or of what it works on, depends on data."""
    if func._schema.name in _MASKABLE:
        return any(tensor.dtype in {torch.bool, torch.uint8} for tensor in trees.tensors(args[1]))
    return torch.Tag.dynamic_output_shape in func.tags


def is_read(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host sees the data of the tensors given to this call."""
    data = args[0] if args else kwargs.get("data")
    return function in READS or (function in BUILDERS and not isinstance(data, Tensor))


@dataclass(frozen=True, slots=True)
class Constant:
    """A device tensor made of host data, with the call that made it."""

    function: Any
    arguments: dict[str, Any]
    value: Tensor

    def made_by(self, function: Any, arguments: dict[str, Any]) -> bool:
        """Whether this is the same call on the same host values."""
        if function is not self.function:
            return False
        held, asked = sign(self.arguments), sign(arguments)
        return held.signature == asked.signature and all(
            torch.equal(a, b) for a, b in zip(held.leaves, asked.leaves, strict=True) if isinstance(a, Tensor)
        )


class HostConstants:
    """The constants of one forward, in order of the calls that make them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[Constant] = []
        self._alike: dict[tuple[Any, Signature], list[Constant]] = {}
        self._served = 0

    def __len__(self) -> int:
        return len(self._kept)

    def _host_only(self, arguments: dict[str, Any]) -> bool:
        """Whether a call takes host data alone. On a CPU engine any tensor argument may be data of the forward."""
        given = trees.tensors(arguments)
        return not given if self._device.type == "cpu" else all(tensor.device.type == "cpu" for tensor in given)

    def _makes(self, function: Any, arguments: dict[str, Any], result: Any) -> bool:
        """Whether this call turned host data into a tensor of the engine's device."""
        return (
            function in MAKERS
            and isinstance(result, Tensor)
            and result.device.type == self._device.type
            and self._host_only(arguments)
        )

    def keep(self, function: Any, arguments: dict[str, Any], result: Any) -> None:
        """Rehearsal: note the result of a call if it is a host constant."""
        if not self._makes(function, arguments, result):
            return
        # equal ones share one tensor: GLM-Image sends the same two RoPE tables to the device 120 times per forward
        alike = self._alike.setdefault((function, sign(arguments).signature), [])
        constant = next((other for other in alike if other.made_by(function, arguments)), None)
        if constant is None:
            # a copy: the forward may go on to write to it
            constant = Constant(function, trees.clone(arguments), result.clone())
            alike.append(constant)
        self._kept.append(constant)

    def rewind(self) -> None:
        """Serve from the first again, to another capturing call."""
        self._served = 0

    def serve(self, function: Any, arguments: dict[str, Any]) -> Tensor | None:
        """Capture: the kept tensor, if the next kept call is this one. Raises `CaptureError` if its values changed."""
        if function not in MAKERS or self._served == len(self._kept):
            return None
        constant = self._kept[self._served]
        if constant.function is not function or not self._host_only(arguments):
            return None
        if not constant.made_by(function, arguments):
            if function in {Tensor.to, Tensor.cuda}:
                return None  # a conversion on the device, or of another tensor, between two kept calls
            raise CaptureError(
                f"{function.__name__} in {diagnose.call_site(None)} made a device tensor from other host values than "
                "in the call before: "
                f"{trees.describe(constant.arguments)}, now {trees.describe(arguments)}. A graph would freeze the "
                "first, and --break auto cannot know the value. Pass it as a tensor argument, or break there by name."
            )
        self._served += 1
        return constant.value

    def check_all_served(self) -> None:
        """Raises `CaptureError` if the capturing call made fewer constants than the rehearsal."""
        if self._served != len(self._kept):
            missing = self._kept[self._served]
            raise CaptureError(
                f"The forward made {len(self._kept)} device tensors from host values in one call and {self._served} in "
                f"the next; {missing.function.__name__}({trees.describe(missing.arguments)}) was missing. "
                "A forward must do the same work for the same arguments to be captured."
            )


class Rehearsal:
    """The warm call before a capture: notes host constants outside breaks, breaks nothing."""

    def __init__(self, constants: HostConstants) -> None:
        self._constants = constants
        self._in_break = False
        self.broke = False
        """Whether anybody's code ran as a break, which may write where it likes."""

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """What else has to see the call: nothing."""
        return contextlib.nullcontext()

    def run_break(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer, self._in_break, self.broke = self._in_break, True, True
        try:
            return function(*args, **kwargs)
        finally:
            self._in_break = outer

    def run_compiled(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with without_modes():
            return function(*args)

    def handle(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if not self._in_break:
            self._constants.keep(function, {"args": args, **kwargs}, result)
        return result


class FunctionWatch(TorchFunctionMode):
    """Routes every torch call of a forward through `handle(function, args, kwargs)`."""

    def __init__(self, handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch with this mode switched off."""
        kwargs = kwargs or {}
        if func is Tensor.new_tensor:
            like = args[0]
            given = {name: value for name, value in kwargs.items() if value is not None}
            return self._handle(torch.tensor, args[1:], {"dtype": like.dtype, "device": like.device} | given)
        return self._handle(func, args, kwargs)


class OperationWatch(TorchDispatchMode):
    """Hands every operation of the forward, also those issued below Python, to `handle(func, args, kwargs)`."""

    def __init__(self, handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Code compiled before runs under this mode as it does without."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.scaled_dot_product_attention.default:  # whole under inference mode alone
            with self:
                return func.decompose(*args, **kwargs)
        return self._handle(func, args, kwargs)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Without the innermost `FunctionWatch`, if there is one: torch.compile's guards refuse to run under such modes."""
    with contextlib.ExitStack() as stack:
        if isinstance(_innermost_mode(), FunctionWatch):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _innermost_mode() -> Any:
    count = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(count - 1) if count else None


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Compiled code runs without any mode: what it does is nobody's operation."""
    with _disable_current_modes():
        yield
