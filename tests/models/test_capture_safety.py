"""What a warm padded forward would do inside a capture, seen on the meta device: host reads and copies from the host.

A model on the meta device has no data, so a tensor made on the host meets it as a copy between two devices, which is
what a CUDA graph cannot hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bcgbench.models import adapter
from bcgbench.models.padding import PadCache
from bcgbench.models.weights import lay_out

READS = ("local_scalar", "nonzero", "masked_select", "unique")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


class Watch(TorchDispatchMode):
    """Notes every operator that reads a value on the host or connects two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {tensor.device.type for tensor in tensors([args, kwargs, out])}
        if len(devices) > 1 or any(read in str(func) for read in READS):
            self.found.append(str(func))
        return out


class Constants(TorchFunctionMode):
    """Notes every tensor made of Python numbers: on a GPU each is a copy from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.tensor, torch.as_tensor):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


CALLS: dict[str, dict[str, Any]] = {
    "tiny/qwen-image": {
        "hidden_states": empty(1, 16, 16), "encoder_hidden_states": empty(1, 17, 16), "timestep": empty(1),
        "img_shapes": [[(1, 4, 4)]],
    },
    "tiny/z-image": {"x": [empty(4, 1, 8, 8)] * 2, "t": empty(2), "cap_feats": [empty(17, 16), empty(40, 16)]},
    "tiny/sana1.5": {
        "hidden_states": empty(2, 4, 8, 8), "encoder_hidden_states": empty(2, 300, 8), "timestep": empty(2),
        "encoder_attention_mask": empty(2, 300, dtype=torch.int64),
    },
    "tiny/longcat-image": {
        "hidden_states": empty(1, 64, 64), "encoder_hidden_states": empty(1, 512, 16), "timestep": empty(1),
        "txt_ids": empty(512, 3), "img_ids": empty(64, 3),
    },
    "tiny/glm-image": {
        "hidden_states": empty(1, 4, 8, 8), "encoder_hidden_states": empty(1, 1, 32), "timestep": empty(1),
        "prior_token_id": empty(1, 16, dtype=torch.int64), "prior_token_drop": empty(1, 16, dtype=torch.bool),
        "target_size": empty(1, 2), "crop_coords": empty(1, 2),
    },
    "tiny/sana-video": {
        "hidden_states": empty(2, 16, 2, 4, 4), "encoder_hidden_states": empty(2, 300, 8), "timestep": empty(2),
        "encoder_attention_mask": empty(2, 300, dtype=torch.int64),
    },
}  # fmt: skip
HOST_CONSTANTS = {"tiny/qwen-image": 1}
"""Qwen-Image makes a tensor of its text length from a host int per forward and drops it; the engine hoists it."""


@pytest.mark.parametrize("model", CALLS)
def test_a_warm_padded_forward_needs_nothing_of_the_host(model: str):
    """The first call moves RoPE tables to the device; from the second on, only known host constants are left."""
    found = adapter(model)
    part = found.networks["transformer"]
    module = lay_out(part.kind, part.config).to("meta")  # buffers too, as a pipeline moves them
    bound = inspect.signature(module.forward).bind(**CALLS[model], return_dict=False)
    bound.apply_defaults()
    padded = found.pad(dict(bound.arguments), buckets=found.default_buckets, cache=PadCache())
    with torch.no_grad():
        found.forward(module, module.forward, padded)
        with Watch() as watch, Constants() as constants:
            found.forward(module, module.forward, padded)
    assert watch.found == []
    assert len(constants.found) == HOST_CONSTANTS.get(model, 0), constants.found


def test_padding_a_second_step_launches_nothing():
    """All of a request's padding happens on its first step."""
    found, memory = adapter("tiny/z-image"), PadCache()
    call = CALLS["tiny/z-image"]
    found.pad(call, buckets=(), cache=memory)
    with Watch() as watch:
        found.pad({**call, "cap_feats": list(call["cap_feats"])}, buckets=(), cache=memory)
    assert watch.found == []
