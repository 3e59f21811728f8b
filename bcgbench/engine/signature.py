"""A call's signature: everything that a captured graph froze, so that equal signatures may share one graph.

Tensors count by shape, strides, dtype, device, class and aliasing, never by value. Constants count by type and value:
True, 1 and 1.0 differ, -0.0 and 0.0 differ, NaN equals itself. A plain object, all of whose state is such constants,
counts by type and state: GLM-Image passes a new, empty cache object with every request. Other objects count by identity
and are kept alive, so that their address cannot be reused. Ambient state that changes the computation is in the key.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bcgbench.engine import trees
from bcgbench.engine.keys import LEAF_LIMIT, Plain, constant_key, object_key
from bcgbench.errors import SignatureError


@dataclass(frozen=True, slots=True)
class Signature:
    """Key of a graph. `held` keeps objects alive that count by identity."""

    leaves: tuple[Any, ...]
    spec: trees.Spec
    ambient: tuple[Any, ...] = ()
    held: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.leaves, self.spec, self.ambient)))

    def __hash__(self) -> int:
        return self._hash

    def fields(self) -> dict[str, Any]:
        """Key of every leaf, container and ambient setting, by path: equal signatures have equal fields."""
        leaves = dict(_leaf_fields(self.spec, self.leaves, ""))
        ambient = {f"({name})": (AMBIENT, value) for name, value in zip(AMBIENT, self.ambient, strict=False)}
        return _containers(self.spec, "") | leaves | ambient

    def __str__(self) -> str:
        tensors = [f"{path} {_readable(leaf)}" for path, leaf in zip(trees.paths(self.spec), self.leaves, strict=True)
                   if leaf[0] is Tensor]  # fmt: skip
        return ", ".join(tensors)


@dataclass(slots=True)
class Call:
    """One call flattened once: its leaves, and the signature made of them. Not frozen: that would double its 0.2 us."""

    leaves: list[Any]
    signature: Signature


def _tensor_key(leaf: Tensor, alias: int) -> tuple[Any, ...]:
    return (Tensor, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, type(leaf), alias)


def leaf_key(leaf: Any) -> tuple[Any, ...]:
    """Key of a leaf that is no tensor; one that begins with `object` counts by identity."""
    return constant_key(leaf) or object_key(leaf) or (object, type(leaf), id(leaf))


def _leaf_fields(spec: trees.Spec, keys: tuple[Any, ...], prefix: str) -> Iterator[tuple[str, Any]]:
    """Path and key of every leaf; a plain object is followed by its attributes."""
    for path, key in zip(trees.paths(spec, prefix=prefix), keys, strict=True):
        if key[0] is not Plain:
            yield path, key
            continue
        _, kind, inner, values = key
        yield path, (Plain, kind, inner.keys)
        yield from _containers(inner, path).items()
        yield from _leaf_fields(inner, values, path)


def _containers(spec: trees.Spec, path: str) -> dict[str, Any]:
    """(dict type, keys and their types) of every container below the arguments, by path."""
    found: dict[str, Any] = {}
    for index, child in enumerate(spec.children):
        if child.kind is not None:
            below = trees.step_to(spec, index, prefix=path)
            found[f"{below} (container)"] = (dict, child.kind.__name__, child.keys, child.key_types, child.factory)
            found |= _containers(child, below)
    return found


def _tensor_text(key: tuple[Any, ...], *, full: bool) -> str:
    """`float32[2, 3]`, in full with strides, device, class and alias."""
    _, shape, stride, dtype, device, kind, alias = key
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    extra = [f"strides {list(stride)}", str(device), kind.__name__] if full else []
    extra += [f"same tensor as leaf {alias}"] if alias >= 0 else []
    return text + (f" ({', '.join(extra)})" if extra else "")


def _readable(key: Any, *, full: bool = False) -> str:
    if key[0] is Tensor:
        return _tensor_text(key, full=full)
    if key[0] is dict:
        return f"{key[1]} of {', '.join(map(repr, key[2]))}" if key[2] else str(key[1])
    if key[0] is float:
        value = float.fromhex(key[1]) if key[1] not in {"nan", "inf", "-inf"} else float(key[1])
        return str(value) if math.isfinite(value) else key[1]
    if key[0] is object or key[0] is Plain:
        return f"<{key[1].__name__} object>"
    if key[0] is AMBIENT:
        return str(key[1])
    return f"{key[1]!r}" if len(key) == 2 else f"{key[0].__name__}{key[1:]}"  # noqa: PLR2004 - (type, value)


def _over_budget(arguments: dict[str, Any]) -> SignatureError:
    def count(tree: Any) -> int:
        try:
            leaves, spec = trees.flatten(tree)
        except RecursionError:
            return sys.maxsize
        return max(len(leaves), len(spec.children))

    name, leaves = max(((name, count(value)) for name, value in arguments.items()), key=lambda item: item[1])
    return SignatureError(
        f"Argument {name!r} has {leaves:,} leaves; a call may have {LEAF_LIMIT:,} in all. Walking them at every "
        "forward costs more than the graph saves: pass a tensor, or leave the argument out."
    )


def sign(arguments: dict[str, Any], *, ambient: tuple[Any, ...] = ()) -> Call:
    """Flatten the bound arguments of a call and compute its signature.

    Raises `SignatureError` if the call has more than `LEAF_LIMIT` leaves, a container that holds itself, or a large
    NumPy array.
    """
    try:
        leaves, spec = trees.flatten(arguments, limit=LEAF_LIMIT)
    except trees.TooManyLeaves:
        raise _over_budget(arguments) from None
    except RecursionError:
        raise SignatureError("An argument contains itself; a graph key needs finite arguments.") from None
    keys: list[tuple[Any, ...]] = []
    held: list[Any] = []
    first: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            alias = first.setdefault(id(leaf), index)
            keys.append(_tensor_key(leaf, alias if alias != index else -1))
            continue
        key = leaf_key(leaf)
        if key[0] is object:
            held.append(leaf)
        keys.append(key)
    return Call(leaves, Signature(tuple(keys), spec, ambient, tuple(held)))


def changed_objects(call: Call) -> Iterator[str]:
    """Paths of the plain objects among a call's arguments that are no longer what was signed."""
    for path, leaf, key in zip(trees.paths(call.signature.spec), call.leaves, call.signature.leaves, strict=True):
        if key[0] is Plain and object_key(leaf) != key:
            yield path


def difference(held: Signature, asked: Signature) -> tuple[str, ...]:
    """Readable lines, one per differing field: `encoder_hidden_states: captured bfloat16[1, 64, 3584], asked ...`."""
    old, new = held.fields(), asked.fields()
    paths = [path for path in dict.fromkeys([*old, *new]) if old.get(path) != new.get(path)]
    # a container is named only where no leaf tells the difference already
    leaves = [path for path in paths if not path.endswith(" (container)")]
    told = [path for path in paths if path in leaves or not any(leaf.startswith(path[:-12]) for leaf in leaves)]
    told = [path for path in told if not any(path.startswith((f"{whole}.", f"{whole}[")) for whole in leaves)]
    return tuple(_difference_line(path, old.get(path), new.get(path)) for path in told)


def _difference_line(path: str, held: Any, asked: Any) -> str:
    texts = [_readable(key) if key else "absent" for key in (held, asked)]
    if texts[0] == texts[1]:
        texts = [_readable(key, full=True) for key in (held, asked)]
    if texts[0] == texts[1]:
        texts = [texts[0], f"another {texts[1]}"]
    return f"{path.removesuffix(' (container)')}: captured {texts[0]}, asked {texts[1]}"


AMBIENT = ("autocast", "grad mode", "inference mode", "training", "attention backend", "adapters", "default dtype",
           "tf32 in matmul", "tf32 in conv", "deterministic", "cudnn benchmark", "cudnn deterministic",
           "bfloat16 reductions", "float16 reductions", "flash attention", "memory-efficient attention",
           "math attention", "cudnn attention")  # fmt: skip
"""What `ambient` reads, in its order."""


def _precisions(*, cuda: bool) -> tuple[Any, Any]:
    """How float32 is rounded in matrix products and convolutions, however that was set: on a GPU, whether to TF32."""
    precision = torch._C._get_fp32_precision_getter
    matmul, conv = (precision("cuda" if cuda else "mkldnn", name) for name in ("matmul", "conv"))
    if cuda:
        return matmul == "tf32", conv == "tf32"
    # "none" is what a precision is until it is set and, computing alike, "ieee" once it was set back
    return matmul.replace("none", "ieee"), conv.replace("none", "ieee")


def ambient(module: nn.Module | None, device_type: str) -> tuple[Any, ...]:
    """State outside the arguments that changes what a forward computes, in the order of `AMBIENT`.

    A tenth of a signature made from the same objects would go to asking a `torch.device` for its type.
    """
    state = torch._C  # what torch.backends reads, without its properties, which cost 5 us per call
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    adapted = module is not None and module.__dict__.get("_hf_peft_config_loaded")
    cuda = device_type == "cuda"
    try:  # the older switches answer in a quarter of the time, and raise where the newer ones disagree (torch 2.9)
        matmul, conv = (
            (state._get_cublas_allow_tf32(), state._get_cudnn_allow_tf32()) if cuda else _precisions(cuda=False)
        )
    except RuntimeError:
        matmul, conv = _precisions(cuda=cuda)
    return (
        state._is_any_autocast_enabled() and torch.is_autocast_enabled(device_type) and
        torch.get_autocast_dtype(device_type),
        state.is_grad_enabled(), state.is_inference_mode_enabled(), module is not None and module.training,
        dispatch and dispatch._AttentionBackendRegistry._active_backend,
        tuple(module.active_adapters()) if adapted else None, state.get_default_dtype(),  # type: ignore[operator, union-attr]
        matmul, conv, state._get_deterministic_algorithms(),
        state._get_cudnn_benchmark(), state._get_cudnn_deterministic(),
        state._get_cublas_allow_bf16_reduced_precision_reduction(),
        state._get_cublas_allow_fp16_reduced_precision_reduction(), state._get_flash_sdp_enabled(),
        state._get_mem_efficient_sdp_enabled(), state._get_math_sdp_enabled(), state._get_cudnn_sdp_enabled(),
    )  # fmt: skip
