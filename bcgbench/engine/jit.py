"""Just-in-time work of a forward: what it compiles, tunes or builds while it runs, each with its place in the model.

Seen: frames compiled by torch.compile, Triton kernels made ready (compiled, or loaded from Triton's disk cache, which
its hook does not tell apart), autotuning by Triton and Inductor, and calls of torch.jit, NVRTC, jiterator and C++
builds through their modules. Not seen, since there is nothing to hook: kernels that torch's C++ compiles on first use,
later passes of a TorchScript executor, and the choice of algorithm inside cuDNN and cuBLASLt.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from bcgbench.engine import diagnose

_CALLS = (
    ("torch.jit", "script", "TorchScript"),
    ("torch.jit", "trace", "TorchScript"),
    ("torch.cuda", "_compile_kernel", "NVRTC"),
    ("torch.cuda.jiterator", "_create_jit_fn", "jiterator"),
    ("torch.cuda.jiterator", "_create_multi_output_jit_fn", "jiterator"),
    ("torch.utils.cpp_extension", "load", "C++ build"),
    ("torch.utils.cpp_extension", "load_inline", "C++ build"),
    ("triton.runtime.autotuner", "Autotuner._bench", "Triton autotuning"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner.autotune_to_one_config", "Inductor autotuning"),
)
"""Module, function or method, and what a call of it is."""

Note = Callable[[str], None]


def compiled(run: Callable[[], object], *, root: nn.Module) -> Counter[str]:
    """The just-in-time work of `run()`, by what and where. Under a dispatch mode torch.compile would compile nothing:
    call this outside any."""
    found: Counter[str] = Counter()

    def note(what: str) -> None:
        found[f"compilation: {what} in {diagnose.call_site(root)}"] += 1

    with contextlib.ExitStack() as stack:
        had_dynamo = _watch_dynamo(stack, note)
        _watch_triton(stack, note)
        for module, name, what in _CALLS:
            _watch_call(stack, sys.modules.get(module), name.split("."), partial(note, what))
        run()
    if not had_dynamo and (frames := _frames()):
        found["compilation: torch.compile, loaded by this call"] += frames
    return found


def _watch_dynamo(stack: contextlib.ExitStack, note: Note) -> bool:
    """Whether torch.compile was loaded, and so is watched."""
    module = sys.modules.get("torch._dynamo.callback")
    if module is None:
        return False

    def begin(*args: Any) -> None:
        trigger = getattr(args[0], "callback_trigger", None) if args else None
        note(f"torch.compile ({trigger.name.lower()})" if trigger is not None else "torch.compile")

    handler = module.callback_handler
    handler.register_start_callback(begin)
    stack.callback(handler.remove_start_callback, begin)
    return True


def _frames() -> int:
    module = sys.modules.get("torch._dynamo.utils")
    return 0 if module is None else int(module.counters["frames"]["total"])


def _watch_triton(stack: contextlib.ExitStack, note: Note) -> None:
    """Triton's hook, which whoever had set it goes on getting."""
    runtime = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
    if runtime is None:
        return
    before = runtime.jit_post_compile_hook

    def ready(*args: Any, **kwargs: Any) -> Any:
        note(f"Triton kernel {getattr(kwargs.get('fn'), 'name', '')}".rstrip())
        return before(*args, **kwargs) if before is not None else None

    runtime.jit_post_compile_hook = ready
    stack.callback(setattr, runtime, "jit_post_compile_hook", before)


def _watch_call(stack: contextlib.ExitStack, owner: Any, path: list[str], note: Callable[[], None]) -> None:
    """Calls of a function or method noted, where it exists."""
    for name in path[:-1]:
        owner = getattr(owner, name, None)
    original = getattr(owner, path[-1], None)
    if original is None:
        return

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return original(*args, **kwargs)

    setattr(owner, path[-1], noted)
    stack.callback(setattr, owner, path[-1], original)
