"""Two calls have equal signatures exactly when one captured graph may serve both; a difference names the argument."""

from __future__ import annotations

import copy
import enum
import gc
import math
import random
import struct
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bcgbench.engine import trees
from bcgbench.engine.keys import LEAF_LIMIT
from bcgbench.engine.signature import AMBIENT, Signature, ambient, changed_objects, difference, sign
from bcgbench.errors import SignatureError


class Mode(enum.Enum):
    """A constant that is compared by identity."""

    TEXT = 1
    IMAGE = 2


class Opaque:
    """An object that only its identity tells apart."""


class Holder:
    """An object made of what it is given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    """An object without a dict."""

    __slots__ = ("mode", "rest")

    def __init__(self, mode: Any) -> None:
        self.mode = mode


class Hidden:
    """An object that does not pickle all of its state."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode

    def __getstate__(self) -> dict[str, Any]:
        return {"kind": 1}


CONSTANTS = [
    None, True, False, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 0j, complex(0.0, -0.0), 1 + 0j,
    complex(math.nan, 0), "", "1", "True", "nan", b"", b"1", torch.float32, torch.bfloat16, torch.device("cpu"),
    torch.device("meta"), torch.Size([1]), torch.Size([]), slice(None), slice(0, 1), slice(0, 1.0), slice(0, True),
    range(1), Mode.TEXT, Mode.IMAGE, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.float64("nan"),
    np.float64(-0.0), np.float64(0.0), torch.contiguous_format, torch.strided,
]  # fmt: skip
"""Values that Python calls equal across types, values that are not equal to themselves, and neighbours of both."""


def typed_equal(a: Any, b: Any) -> bool:
    """The definition the signature is held to: equal type, and equal value down to the sign of zero and NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (a != a and b != b) or struct.pack("d", a) == struct.pack("d", b)  # noqa: PLR0124 - NaN
    if isinstance(a, complex):
        return typed_equal(a.real, b.real) and typed_equal(a.imag, b.imag)
    if isinstance(a, slice):
        return all(map(typed_equal, (a.start, a.stop, a.step), (b.start, b.stop, b.step)))
    return a == b


def nests() -> st.SearchStrategy[Callable[[Any], Any]]:
    """Ways to wrap a value in an argument."""
    return st.sampled_from([lambda x: x, lambda x: [x], lambda x: {"inner": (x, None)}, lambda x: [[], {"deep": [x]}]])


def signature(value: Any, *, name: str = "x") -> Signature:
    """Signature of a call with one argument."""
    return sign({name: value}).signature


def fresh(value: Any) -> Any:
    """An equal value that is another object, so that identity cannot be what makes two keys equal."""
    if isinstance(value, float) and type(value) is float:
        return struct.unpack("d", struct.pack("d", value))[0]
    return value


class TestConstants:
    @given(st.sampled_from(CONSTANTS), st.sampled_from(CONSTANTS), nests())
    def test_equal_exactly_when_type_and_value_are(self, a: Any, b: Any, nest: Callable[[Any], Any]) -> None:
        """True, 1 and 1.0 differ, 0.0 and -0.0 differ, NaN equals NaN, at every depth."""
        held, asked = signature(nest(a)), signature(nest(fresh(b)))
        assert (held == asked) is typed_equal(a, b)

    @given(st.sampled_from(CONSTANTS), nests())
    def test_equal_signatures_have_equal_hashes(self, value: Any, nest: Callable[[Any], Any]) -> None:
        """A signature is a dictionary key."""
        assert hash(signature(nest(value))) == hash(signature(nest(fresh(value))))

    @given(st.floats(), st.floats())
    def test_floats(self, a: float, b: float) -> None:
        """Any two floats, subnormal and infinite ones included."""
        assert (signature(a) == signature(b)) is typed_equal(a, b)

    @given(st.one_of(st.integers(), st.booleans(), st.text(max_size=3)), st.one_of(st.integers(), st.booleans()))
    def test_other_scalars(self, a: Any, b: Any) -> None:
        """Any two of int, bool and str."""
        assert (signature(a) == signature(b)) is typed_equal(a, b)

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            ({1: None}, {True: None}),
            (frozenset({1}), frozenset({True})),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
            ({"a": 1}, OrderedDict(a=1)),
            ([1], (1,)),
            ([], ()),
            ([], None),
            ({}, None),
            ([None], None),
            (np.zeros(3, np.float32), np.zeros(3, np.int32)),
            (np.zeros(4), np.zeros((2, 2))),
            (np.zeros(2), np.array([0.0, -0.0])),
        ],
    )
    def test_unlike_values_have_unlike_signatures(self, a: Any, b: Any) -> None:
        """Containers count by type, key and order; small arrays by dtype, shape and bytes."""
        assert signature(a) != signature(b)

    def test_small_arrays_count_by_content_not_identity(self) -> None:
        """A new array of equal bytes is the same call."""
        assert signature(np.arange(4)) == signature(np.arange(4))

    def test_names_of_arguments_count(self) -> None:
        """The same value as another argument is another call."""
        assert signature(1, name="guidance") != signature(1, name="timestep")


class TestTensors:
    @given(st.lists(st.integers(0, 4), max_size=3), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    def test_values_do_not_count(self, shape: list[int], dtype: torch.dtype) -> None:
        """One graph serves every content of its inputs."""
        assert signature(torch.zeros(shape, dtype=dtype)) == signature(torch.ones(shape, dtype=dtype))

    @given(
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.sampled_from([torch.float32, torch.float16]),
        st.sampled_from([torch.float32, torch.float16]),
    )
    def test_shape_and_dtype_count(
        self, shape_a: tuple[int, int], shape_b: tuple[int, int], dtype_a: torch.dtype, dtype_b: torch.dtype
    ) -> None:
        """Equal exactly when shape and dtype are, for contiguous tensors."""
        held, asked = torch.zeros(shape_a, dtype=dtype_a), torch.zeros(shape_b, dtype=dtype_b)
        assert (signature(held) == signature(asked)) is ((shape_a, dtype_a) == (shape_b, dtype_b))

    @pytest.mark.parametrize(
        "other",
        [
            torch.zeros(3, 2).t(),
            torch.zeros(1, 3).expand(2, 3),
            torch.zeros(2, 6)[:, ::2],
            torch.zeros(2, 3, device="meta"),
            nn.Parameter(torch.zeros(2, 3)),
            None,
            0.0,
            [[0.0] * 3] * 2,
        ],
        ids=["transposed", "expanded", "gaps", "device", "parameter", "None", "float", "list"],
    )
    def test_what_else_differs(self, other: Any) -> None:
        """Strides, device and class count, and a tensor is never equal to something that is none."""
        assert signature(torch.zeros(2, 3)) != signature(other)

    def test_the_same_tensor_twice_differs_from_two(self) -> None:
        """A graph captured with q is k reads one buffer for both."""
        one, two = torch.zeros(2), torch.zeros(2)
        assert sign({"q": one, "k": one}).signature != sign({"q": one, "k": two}).signature
        assert sign({"q": one, "k": one}).signature == sign({"q": two, "k": two}).signature

    def test_which_tensors_are_shared_counts(self) -> None:
        """Two pairings of four arguments are two calls."""
        a, b = torch.zeros(2), torch.zeros(2)
        assert signature([a, a, b, b]) != signature([a, b, a, b])
        assert signature([a, b, a, b]) == signature([b, a, b, a])

    def test_storage_offset_does_not_count(self) -> None:
        """A slice of a larger buffer is copied like any other input."""
        assert signature(torch.zeros(4)[2:]) == signature(torch.zeros(2))


class TestObjects:
    def test_objects_count_by_identity(self) -> None:
        """An object that is not a known constant is the same only if it is that object."""
        one = Opaque()
        assert signature(one) == signature(one)
        assert signature(one) != signature(Opaque())

    def test_a_signature_keeps_its_objects_alive(self) -> None:
        """A freed object's address could be taken by another one, which would then be found in the cache."""
        thing = Opaque()
        gone = weakref.ref(thing)
        kept = signature(thing)
        del thing
        gc.collect()
        assert gone() is not None
        assert kept.held[0] is gone()

    def test_a_signature_keeps_no_tensor_alive(self) -> None:
        """Keys of a cache must not hold the inputs of every captured call."""
        tensor = torch.zeros(2)
        gone = weakref.ref(tensor)
        kept = signature([tensor])
        del tensor
        gc.collect()
        assert gone() is None
        assert "float32[2]" in str(kept)


def states() -> st.SearchStrategy[Any]:
    """What a plain object is made of: constants, lists, dicts and further objects."""
    return st.recursive(
        st.sampled_from(CONSTANTS),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            st.builds(Holder, a=inner, b=inner),
            st.builds(Slotted, inner),
        ),
        max_leaves=6,
    )


def attributes(value: Any) -> Any:
    """The state of a test object."""
    return vars(value) if isinstance(value, Holder) else {"mode": value.mode}


def same_state(a: Any, b: Any) -> bool:
    """Equal type, order and content all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (Holder, Slotted)):
        return same_state(attributes(a), attributes(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(same_state, a, b))
    return typed_equal(a, b)


class TestPlainObjects:
    """Objects of Python alone count by type and state: GLM-Image makes a new, empty cache object for every request."""

    @given(states(), states(), nests())
    def test_equal_exactly_when_type_and_state_are(self, a: Any, b: Any, nest: Callable[[Any], Any]) -> None:
        """However deep; a difference names a path, and equal ones have no difference."""
        held, asked = signature(nest(Holder(state=a))), signature(nest(Holder(state=b)))
        assert (held == asked) is same_state(a, b)
        assert (difference(held, asked) == ()) is (held == asked)
        assert held == signature(nest(Holder(state=copy.deepcopy(a))))
        assert hash(held) == hash(signature(nest(Holder(state=copy.deepcopy(a)))))

    @pytest.mark.parametrize(
        "make",
        [Holder, lambda: Holder(x=torch.zeros(2)), lambda: Holder(x=[{"k": torch.zeros(2)}]),
         lambda: Holder(x=Holder(y=torch.zeros(2))), lambda: nn.Linear(2, 2), lambda: Holder(f=nn.Linear(2, 2)),
         lambda: Holder(f=print), lambda: Holder(x=object()), lambda: Hidden(1), lambda: Holder(x=deque([1])),
         lambda: {1, 2}, lambda: Holder(x={1}), lambda: random.Random(0), torch.Generator,
         lambda: Holder(x=[0] * (LEAF_LIMIT + 1)), lambda: Holder(x=np.zeros(10_000)), lambda: iter([1]),
         lambda: Holder(a=Holder(x=[0] * 600), b=Holder(x=[0] * 600))],
        ids=["empty", "tensor", "nested tensor", "tensor in an object", "module", "holds a module", "callable",
             "sentinel", "own pickling", "deque", "set", "holds a set", "random", "generator", "many", "array",
             "iterator", "many in all"],
    )  # fmt: skip
    def test_what_still_counts_by_identity(self, make: Callable[[], Any]) -> None:
        """Data, code, state outside Python, or more than can be walked at every call."""
        one = make()
        assert signature(one) == signature(one)
        assert signature(one) != signature(make())
        assert signature(one).held == (one,)

    @pytest.mark.parametrize("hold", [lambda o: o, lambda o: [o], lambda o: Holder(o=o)])
    def test_an_object_that_holds_itself(self, hold: Callable[[Any], Any]) -> None:
        """Its state has no end, so its identity counts."""
        one = Holder(a=1)
        one.me = hold(one)
        assert signature(one) == signature(one)
        assert len(signature(one).held) == 1

    def test_a_list_of_an_object_that_holds_itself(self) -> None:
        """Endless lists inside an object are no error of the call."""
        loop: list[Any] = []
        loop.append(loop)
        assert len(signature(Holder(x=loop)).held) == 1

    def test_an_object_met_twice_is_no_cycle(self) -> None:
        """Only one that is inside itself is."""
        shared = Holder(a=1)
        assert signature(Holder(x=[shared, shared])) == signature(Holder(x=[Holder(a=1), Holder(a=1)]))

    @pytest.mark.parametrize(
        ("held", "asked", "line"),
        [
            (Holder(mode=None), Holder(mode="write"), "x.mode: captured None, asked 'write'"),
            (Holder(c=[Holder(i=0)]), Holder(c=[Holder(i=1)]), "x.c[0].i: captured 0, asked 1"),
            (Slotted(1), Slotted(2), "x.mode: captured 1, asked 2"),
            (Holder(c=[]), Holder(c=[1]), "x.c[0]: captured absent, asked 1"),
            (Holder(mode=1), Slotted(1), "x: captured <Holder object>, asked <Slotted object>"),
            (Holder(mode=1), None, "x: captured <Holder object>, asked None"),
        ],
    )
    def test_the_line(self, held: Any, asked: Any, line: str) -> None:
        """The attribute that differs is named."""
        assert difference(signature(held), signature(asked)) == (line,)

    @pytest.mark.parametrize(
        "change",
        [lambda o: setattr(o, "mode", "write"), lambda o: o.rows.append(1), lambda o: o.rows.append(torch.zeros(2)),
         lambda o: setattr(o, "mode", o)],
    )  # fmt: skip
    def test_changed_objects_are_found(self, change: Callable[[Any], Any]) -> None:
        """By their paths; what counts by identity is not looked into."""
        one = Holder(mode=None, rows=[])
        call = sign({"n": 1, "caches": [Opaque(), one]})
        assert list(changed_objects(call)) == []
        change(one)
        assert list(changed_objects(call)) == ["caches[1]"]


class TestRefusals:
    def test_too_many_leaves_name_the_argument(self) -> None:
        """A nested list of 72,000 Nones is refused with its name and count, not hashed at every forward."""
        nested = [[[None] * 30 for _ in range(40)] for _ in range(60)]
        with pytest.raises(SignatureError, match=r"'attention_kwargs'.*72,000"):
            sign({"hidden_states": torch.zeros(2), "attention_kwargs": nested, "timestep": torch.zeros(1)})

    @pytest.mark.parametrize(("leaves", "refused"), [(LEAF_LIMIT, False), (LEAF_LIMIT + 1, True)])
    def test_the_budget_is_exact(self, leaves: int, refused: bool) -> None:
        """The documented number of leaves is allowed, one more is not."""
        if refused:
            with pytest.raises(SignatureError):
                sign({"x": [None] * leaves})
        else:
            assert len(sign({"x": [None] * leaves}).leaves) == leaves

    def test_empty_containers_count_too(self) -> None:
        """72,000 empty lists cost as much to walk as 72,000 Nones."""
        with pytest.raises(SignatureError, match="layers"):
            sign({"layers": [[] for _ in range(72_000)]})

    def test_an_argument_that_contains_itself(self) -> None:
        """Endless nesting is an error of the call, not of Python's stack."""
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(SignatureError, match="contains itself"):
            sign({"x": loop})

    def test_a_large_array(self) -> None:
        """An array too large to compare at every call says to pass a tensor."""
        with pytest.raises(SignatureError, match=r"80,000 bytes.*tensor"):
            sign({"x": np.zeros(10_000)})


def with_device(device: str) -> Signature:
    """A signature on a device that this machine may lack."""
    key = (Tensor, torch.Size([2]), (1,), torch.float32, torch.device(device), Tensor, -1)
    return Signature((key,), trees.flatten({"latents": 0})[1])


class TestDifference:
    @given(st.sampled_from(CONSTANTS), st.sampled_from(CONSTANTS), nests())
    def test_empty_exactly_for_equal_signatures(self, a: Any, b: Any, nest: Callable[[Any], Any]) -> None:
        """A miss always has a reason, and a hit never."""
        held, asked = signature(nest(a)), signature(nest(b))
        assert (difference(held, asked) == ()) is (held == asked)

    @pytest.mark.parametrize(
        ("held", "asked", "line"),
        [
            (torch.zeros(1, 64), torch.zeros(1, 80), "x: captured float32[1, 64], asked float32[1, 80]"),
            (torch.zeros(2), torch.zeros(2).half(), "x: captured float32[2], asked float16[2]"),
            (torch.zeros(2), None, "x: captured float32[2], asked None"),
            (True, 1, "x: captured True, asked 1"),
            (1, 1.0, "x: captured 1, asked 1.0"),
            (0.0, -0.0, "x: captured 0.0, asked -0.0"),
            ("1", 1, "x: captured '1', asked 1"),
            ([1, 2], [1, 3], "x[1]: captured 2, asked 3"),
            ([1], [1, 2], "x[1]: captured absent, asked 2"),
            ({"scale": 1}, {"scale": 2}, "x.scale: captured 1, asked 2"),
        ],
    )
    def test_the_line(self, held: Any, asked: Any, line: str) -> None:
        """One line names the path, the captured and the asked value."""
        assert difference(signature(held), signature(asked)) == (line,)

    @pytest.mark.parametrize(
        ("held", "asked"),
        [
            (torch.zeros(2, 3), torch.zeros(3, 2).t()),
            (torch.zeros(2, 3), torch.zeros(1, 3).expand(2, 3)),
            (torch.zeros(2), torch.zeros(2, device="meta")),
            (np.float32(1), np.float64(1)),
            (torch.float16, torch.bfloat16),
            (slice(0, 1), slice(0, 2)),
            (torch.zeros(1, 4), torch.zeros(2, 8)[:1, :4]),
            (torch.zeros(2), nn.Parameter(torch.zeros(2))),
            ([1], (1,)),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
            ([], ()),
            (Opaque(), Opaque()),
        ],
        ids=[
            "strides", "expanded", "device", "numpy-type", "dtype", "slice", "stride-of-one-row", "parameter",
            "list-tuple", "key-order", "empty-list-tuple", "object",
        ],
    )  # fmt: skip
    def test_every_difference_names_the_argument(self, held: Any, asked: Any) -> None:
        """The line begins with the argument's name and shows two different texts."""
        (line,) = difference(sign({"same": 1, "rope": held}).signature, sign({"same": 1, "rope": asked}).signature)
        assert line.startswith("rope")
        captured, _, wanted = line.partition(": captured ")[2].partition(", asked ")
        assert captured != wanted

    def test_cpu_against_cuda_is_named(self) -> None:
        """An input left on the CPU is a frequent mistake, so the line says so."""
        (line,) = difference(with_device("cuda:0"), with_device("cpu"))
        assert line.startswith("latents")
        assert "cuda" in line
        assert "cpu" in line

    def test_aliasing_is_named(self) -> None:
        """The second occurrence says which leaf it shares."""
        one, two = torch.zeros(2), torch.zeros(2)
        lines = difference(sign({"q": one, "k": two}).signature, sign({"q": one, "k": one}).signature)
        assert len(lines) == 1
        assert lines[0].startswith("k: ")
        assert "same tensor" in lines[0]

    def test_only_what_differs_is_named(self) -> None:
        """Of many arguments, the two that changed are named, in order."""
        call = {"hidden_states": torch.zeros(2), "timestep": torch.zeros(1), "guidance": 4.0, "return_dict": False}
        changed = call | {"timestep": torch.zeros(2), "return_dict": True}
        lines = difference(sign(call).signature, sign(changed).signature)
        assert [line.split(":")[0] for line in lines] == ["timestep", "return_dict"]

    def test_no_line_shows_an_address(self) -> None:
        """Addresses tell a reader nothing and differ between runs."""
        lines = difference(signature([Opaque(), 1]), signature([Opaque(), 2]))
        assert lines
        assert "0x" not in " ".join(lines)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


class TestAmbient:
    def test_equal_without_a_change(self) -> None:
        """Reading the surroundings twice gives the same key."""
        module = nn.Linear(1, 1)
        assert ambient(module, "cpu") == ambient(module, "cpu")

    @pytest.mark.parametrize(
        ("context", "name"),
        [
            (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "autocast"),
            (torch.no_grad, "grad mode"),
            (lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), "flash attention"),
        ],
        ids=["autocast", "no_grad", "sdpa"],
    )
    def test_state_outside_the_arguments_is_part_of_the_key(self, context: Callable[[], Any], name: str) -> None:
        """A graph captured under another setting is not found, and the setting is named."""
        before = sign({"x": 1}, ambient=ambient(None, "cpu")).signature
        with context():
            within = sign({"x": 1}, ambient=ambient(None, "cpu")).signature
        assert before != within
        assert f"({name})" in [line.split(":")[0] for line in difference(before, within)]

    def test_training_flag(self) -> None:
        """Dropout and batch statistics hang on it."""
        module = nn.Linear(1, 1)
        at, before = AMBIENT.index("training"), ambient(module, "cpu")
        module.eval()
        assert before[at] is True
        assert ambient(module, "cpu")[at] is False

    @pytest.mark.parametrize(
        ("holder", "switch"),
        [
            (torch.backends.cudnn, "benchmark"),
            (torch.backends.cudnn, "allow_tf32"),
            (torch.backends.cudnn, "deterministic"),
            (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        ],
    )
    def test_numeric_switches(self, holder: Any, switch: str) -> None:
        """A switch that changes which kernels run, or how they round, is part of the key."""
        before, value = ambient(None, "cuda"), getattr(holder, switch)
        setattr(holder, switch, not value)
        try:
            assert ambient(None, "cuda") != before
        finally:
            setattr(holder, switch, value)

    @pytest.mark.parametrize(
        ("holder", "value", "device"),
        [
            (torch.backends.mkldnn.matmul, "bf16", CPU), (torch.backends.mkldnn.conv, "bf16", CPU),
            (torch.backends.cuda.matmul, "tf32", GPU), (torch.backends.cudnn.conv, "ieee", GPU),
        ],
    )  # fmt: skip
    def test_precision_set_the_newer_way(self, holder: Any, value: str, device: torch.device) -> None:
        """torch's older switches raise then (torch 2.9)."""
        before, kept = ambient(None, device.type), holder.fp32_precision
        holder.fp32_precision = value
        try:
            assert ambient(None, device.type) != before
        finally:
            holder.fp32_precision = kept
        assert ambient(None, device.type) == before

    @pytest.mark.parametrize("device", [CPU, GPU])
    def test_a_precision_set_back_is_the_key_of_before(self, device: torch.device) -> None:
        """torch then says "ieee" where it said "none"; a graph must be found again."""
        before = ambient(None, device.type)
        torch.set_float32_matmul_precision("medium")
        within = ambient(None, device.type)
        torch.set_float32_matmul_precision("highest")
        assert ambient(None, device.type) == before != within

    def test_autocast_dtypes_differ(self) -> None:
        """bfloat16 and float16 autocast compute different numbers."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one = ambient(None, "cpu")
        with torch.autocast("cpu", dtype=torch.float16):
            two = ambient(None, "cpu")
        assert one != two


def test_keys_that_cannot_be_sorted_are_a_signature() -> None:
    """A dict keyed by numbers and names; sorting its keys would raise."""
    mixed = sign({"x": {1: torch.ones(1), "one": 2}})
    assert mixed.signature == sign({"x": {1: torch.zeros(1), "one": 2}}).signature
    assert mixed.signature != sign({"x": {1: torch.ones(1), "one": 3}}).signature
