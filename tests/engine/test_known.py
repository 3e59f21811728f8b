"""A call told from the objects of those before has the signature that walking its arguments gives."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcgbench.engine.known import KnownCalls
from bcgbench.engine.signature import Call, sign
from bcgbench.errors import SignatureError

AMBIENT = (False, True)
Pair = namedtuple("Pair", "a b")


class Text(str):
    """A key that equals a string."""

    __slots__ = ()


class Cache:
    """Of a kind that GLM-Image makes anew for each request."""

    def __init__(self):
        self.a = 1


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def arguments(**changed: Any) -> dict[str, Any]:
    """A call of Qwen-Image's kind; tensors made anew."""
    return {"x": torch.ones(2, 3), "t": torch.ones(1), "shapes": [[(1, 4, 4)]], "scale": 1.5, "mask": None,
            "rotary": (torch.ones(2), [torch.ones(3), True]), "return_dict": False} | changed  # fmt: skip


def check(known: KnownCalls, asked: dict[str, Any]) -> Call:
    """Signed both ways, alike."""
    got, want = known.sign(asked, ambient=AMBIENT), sign(asked, ambient=AMBIENT)
    assert got.signature == want.signature
    assert hash(got.signature) == hash(want.signature)
    assert len(got.leaves) == len(want.leaves)
    assert all(a is b or (a == b and type(a) is type(b)) for a, b in zip(got.leaves, want.leaves, strict=True))
    return got


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"x": torch.ones(3, 2)}, {"x": torch.ones(2, 3).double()}, {"x": torch.ones(3, 2).t()}, {"x": None},
        {"x": torch.nn.Parameter(torch.ones(2, 3))}, {"x": torch.ones(2, 3, device="meta")}, {"t": 1.0},
        {"shapes": [[(1, 4, 5)]]}, {"shapes": [[(True, 4, 4)]]}, {"shapes": [[(1.0, 4, 4)]]}, {"shapes": [[[1, 4, 4]]]},
        {"shapes": [[Pair(1, 4), 4]]}, {"shapes": [[(np.int64(1), 4, 4)]]}, {"shapes": ([(1, 4, 4)],)},
        {"shapes": [torch.ones(1)]}, {"shapes": []}, {"scale": 1}, {"scale": True}, {"scale": -1.5},
        {"scale": float("nan")}, {"scale": [1.5]}, {"mask": False}, {"mask": object()}, {"mask": {}}, {"mask": "a"},
        {"mask": Cache()}, {"mask": SimpleNamespace(a=1)}, {"mask": np.ones(2)}, {"mask": Pair(None, torch.ones(1))},
        {"mask": slice(1)}, {"mask": {Text("a"): torch.ones(1)}}, {"mask": {np.int64(1): 1}}, {"mask": {b"a": 1}},
        {"mask": {memoryview(b"a"): 1}}, {"mask": {np.uint64(1): 1}},
        {"mask": {"a": torch.ones(1)}}, {"mask": {"a": 1}}, {"mask": {1: 1}}, {"mask": torch.float16},
        {"rotary": (torch.ones(2), [torch.ones(3), 1])}, {"rotary": (torch.ones(2), (torch.ones(3), True))},
        {"rotary": (torch.ones(2),)}, {"more": 1},
    ],
)  # fmt: skip
def test_a_call_is_signed_as_by_a_walk(changed: dict[str, Any]):
    """After another call, again, after the other again, and with its tensors made anew."""
    known = KnownCalls()
    check(known, arguments())
    other = arguments(**changed)
    for asked in (other, other, arguments(), other, arguments(**changed), {**other}):
        check(known, asked)
    check(known, dict(reversed(other.items())))


def test_a_call_of_known_form_is_not_walked(monkeypatch: pytest.MonkeyPatch):
    """The next step's latent is another tensor; the signature is the same object."""
    known = KnownCalls()
    first = known.sign(arguments(), ambient=AMBIENT)
    monkeypatch.setattr("bcgbench.engine.known.sign", lambda *_, **__: pytest.fail("walked"))
    for _ in range(2):
        assert known.sign(arguments(), ambient=AMBIENT).signature is first.signature


def test_aliasing_is_seen():
    """One tensor in two places is another graph."""
    known, one, two = KnownCalls(), torch.ones(2), torch.ones(2)
    calls = [{"a": one, "b": two}, {"a": one, "b": one}, {"a": two, "b": two}, {"a": two, "b": one}]
    signatures = [check(known, call).signature for call in calls * 2]
    assert len(set(signatures)) == 2


@pytest.mark.parametrize("change", [torch.Tensor.t_, lambda x: x.resize_(6), lambda x: x.unsqueeze_(0)])
def test_a_tensor_changed_in_shape_is_seen(change: Any):
    """The same object, whose form is another."""
    known, call = KnownCalls(), arguments(x=torch.ones(2, 3))
    check(known, call)
    change(call["x"])
    check(known, call)


def test_containers_and_objects_changed_in_place_are_seen():
    """The same objects with another content."""
    known, held = KnownCalls(), Cache()
    array = np.ones(2)
    call = arguments(mask=held, t=array)
    check(known, call)
    for change in (lambda: call["shapes"][0].append(1), lambda: setattr(held, "a", 2), lambda: array.fill(3),
                   call["rotary"][1].pop, lambda: call["rotary"][1].append(call["rotary"])):  # fmt: skip
        before = known.sign(call, ambient=AMBIENT).signature
        change()
        try:
            expected = sign(call, ambient=AMBIENT).signature
        except SignatureError:
            with pytest.raises(SignatureError):
                known.sign(call, ambient=AMBIENT)
            continue
        assert known.sign(call, ambient=AMBIENT).signature == expected != before


def test_ambient_state_is_part_of_it():
    """As in any signature."""
    known = KnownCalls()
    call = arguments()
    assert known.sign(call, ambient=AMBIENT).signature != known.sign(call, ambient=()).signature


def test_inference_tensors_have_no_counter():
    """They are held against what they were each time."""
    with torch.inference_mode():
        known, call = KnownCalls(), arguments()
        check(known, call)
        check(known, call)
        call["x"].t_()
        check(known, call)


def test_no_tensor_is_kept_alive():
    """A prompt's tensors go when the pipeline lets them go."""
    known, call = KnownCalls(), arguments()
    gone = weakref.ref(call["x"])
    known.sign(call, ambient=AMBIENT)
    del call
    gc.collect()
    assert gone() is None


def test_no_object_is_kept_alive_that_counts_by_value():
    """GLM-Image's cache is empty when it is signed, and holds the prompt's keys later."""
    known, call = KnownCalls(), arguments(mask=Cache())
    known.sign(call, ambient=AMBIENT)
    gone = weakref.ref(call["mask"])
    del call
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": torch.ones(1)}, {Text("a"): torch.ones(1)}), ({np.int64(1): 1}, {np.uint64(1): 1}),
        ({b"a": 1}, {memoryview(b"a"): 1}), ([{b"\0": 1}], [{np.bool_(False): 1}]),
    ],
)  # fmt: skip
def test_equal_keys_of_other_types_differ(first: Any, second: Any):
    """A dict takes them for equal, and marshal writes them alike."""
    known = KnownCalls()
    for _ in range(2):
        check(known, arguments(mask=first))
        check(known, arguments(mask=second))


def test_a_long_list_is_refused_by_name():
    """Before and after a call of the same form (sglang#33989: 72,000 leaves hashed per forward)."""
    known, call = KnownCalls(), arguments()
    for _ in range(2):
        with pytest.raises(SignatureError, match=r"Argument 'shapes' has 72,000 leaves"):
            known.sign(call | {"shapes": list(range(72_000))}, ambient=AMBIENT)
        check(known, call)


VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, 0.0, -0.0, float("nan"), "a", b"a", torch.float32, 1j]),
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=12))
def test_random_calls_are_signed_as_by_a_walk(values: list[tuple[Any, Any]]):
    """Constants in containers, in any order of calls, more than are remembered."""
    known = KnownCalls()
    for first, second in values * 2:
        asked = {"x": torch.ones(1), "a": first, "b": second}
        assert known.sign(asked, ambient=()).signature == sign(asked).signature
