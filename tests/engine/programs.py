"""Random programs, for any device: operations over 4x4 matrices, drawn by hypothesis and checked against eager.

A program is a list of operations: arithmetic, views, writes in place, host reads, constants, random draws and breaks of
several kinds, over nested and aliased arguments, with results in containers. Here: what a program is, drawing and
checking one. Not here: how many, which are in the tests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, currently_in_test_context, event, settings
from hypothesis import strategies as st
from torch import Tensor

from bcgbench.engine import trees
from bcgbench.engine.breaks import BreakPolicy, break_graph, eager_on_graph
from bcgbench.engine.diagnose import same_value
from bcgbench.engine.graphed import GraphedForward
from bcgbench.errors import CaptureError

N = 4
CPU = torch.device("cpu")
Binary = Callable[[Tensor, Tensor], Any]


def times(share: int) -> settings:
    """`share` times the profile's number of programs: some write to expanded matrices, which eager refuses too."""
    count = share * settings.default.max_examples
    return settings(max_examples=count, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


def assign(a: Tensor, b: Tensor) -> Tensor:
    """Write some rows of one matrix into another."""
    a[1:3] = b[:2]
    return a


def fill(a: Tensor, b: Tensor) -> None:
    """A break that writes to its argument and returns nothing."""
    a.mul_(0.5).add_(b)


def write_and_use(function: Any) -> Binary:
    """A break without a result; the program goes on with its argument."""
    return lambda a, b: (function(a, b), a + b)[1]


PLAIN: dict[str, Binary] = {
    "matmul": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b, b[0]),
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b * 0.5,
    "relu": lambda a, _: a.relu(),
    "norm": lambda a, _: F.layer_norm(a, (N,)),
    "softmax": lambda a, b: (a + b).softmax(-1),
    "where": lambda a, b: torch.where(a > b, a, b * 2),
    "cumsum": lambda a, _: a.cumsum(0) * 0.25,
    "cat": lambda a, b: torch.cat([a[:2], b[2:]]),
    "chunk": lambda a, b: torch.cat(list(reversed(a.chunk(2, 1))), 1) - b,
    "stack": lambda a, b: torch.stack([a[0], b[1], a[2], b[3]]),
    "gather": lambda a, b: a.gather(1, b.argsort(1)),
    "clone": lambda a, _: a.clone(),
    "out": lambda a, b: torch.add(a, b, out=torch.empty(N, N, device=a.device)),
    "zeros": lambda a, b: torch.zeros_like(a).index_add_(0, torch.arange(N, device=a.device).flip(0), a * b),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None])[0],
    "bfloat16": lambda a, b: (a.bfloat16() * b.bfloat16()).float(),
    "integers": lambda a, b: b + (a.clamp(-9, 9) * 4).nan_to_num().int().bitwise_and(3),
    "topk": lambda a, b: torch.cat(a.topk(2), 1) + b,
    "statistics": lambda a, b: torch.mul(*torch.var_mean(a, 1, keepdim=True)) + b,
    "einsum": lambda a, b: torch.einsum("ij,jk,ki->ij", a, b, a),
    "complex": lambda a, b: torch.view_as_real(torch.view_as_complex(a.reshape(N, 2, 2)) * 1j).reshape(N, N) + b,
}
VIEWS: dict[str, Binary] = {
    "transpose": lambda a, _: a.t(),
    "flip": lambda a, _: a.flip(0),
    "expand": lambda a, _: a[:1].expand(N, N),
    "column": lambda a, _: a[:, 1:2].expand(N, N),
    "reshape": lambda a, _: a.reshape(2, 8).view(N, N),
    "contiguous": lambda a, _: a.contiguous(),
    "unfold": lambda a, _: a.reshape(-1)[:7].unfold(0, N, 1),
    "turned in place": lambda a, _: a[:].t_(),
    "squares": lambda a, _: a.reshape(2, 2, 2, 2).permute(2, 0, 3, 1).reshape(N, N),
}
IN_PLACE: dict[str, Binary] = {
    "add_": lambda a, b: a.add_(b),
    "assign": assign,
    "relu_": lambda a, _: a.relu_(),
    "diagonal": lambda a, b: (a.diagonal().mul_(b[0]), a)[1],
    "clamp_": lambda a, _: a.clamp_(max=0.5),
    "copy_": lambda a, b: a.copy_(b.t()),
    "t_": lambda a, _: a.t_(),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 0, 0.25),
    "index_copy_": lambda a, b: a.index_copy_(0, torch.arange(2, device=a.device), b[2:]),
    "zero row": lambda a, _: (a[2].zero_(), a)[1],
}
CONSTANTS: dict[str, Binary] = {
    "constant": lambda a, _: a * torch.tensor([1.0, 2.0, 0.5, -1.0], device=a.device),
    "written constant": lambda a, b: a + torch.as_tensor([0.0, 1.0, 2.0, 3.0], device=a.device).add_(b[0]),
    "like": lambda a, b: a + b.new_tensor([1.0, 0.0, 0.0, 1.0]).mul_(a[1]),
}
BREAKS: dict[str, Binary] = {
    "break": eager_on_graph(lambda a, b: a @ b),
    "break sliced": lambda a, b: eager_on_graph(lambda x, y: torch.cat([x, y], 1)[:, ::2])(a, b) + 1,
    "break expanded": eager_on_graph(lambda a, b: (a + b)[:1].expand(N, N)),
    "break tuple": lambda a, b: torch.add(*eager_on_graph(lambda x, y: (x * y, x.t()))(a, b)),
    "break tree": lambda a, b: eager_on_graph(lambda t: {"r": [t["a"][0] - t["b"], 1]})({"a": [a], "b": b})["r"][0],
    "break argument": eager_on_graph(lambda a, _: a),
    "break view": eager_on_graph(lambda a, _: a.t()[1:2].expand(N, N)),
    "break keyword": lambda a, b: eager_on_graph(lambda x, *, y: x.clone().add_(y))(a, y=b),
    "break nested": eager_on_graph(lambda a, b: eager_on_graph(torch.mul)(a, b) + a),
    "break write": write_and_use(eager_on_graph(fill)),
    "break bare": lambda a, b: (break_graph(), a - b)[1],
}
READS: dict[str, Binary] = {
    "item": lambda a, b: a + round(b[0, 0].nan_to_num().clamp(-1, 1).item()),
    "branch": lambda a, b: a if b.sum() > 0 else a * 2,
    "choose": eager_on_graph(lambda a, b: a if a.sum() > b.sum() else b),
    "decide": lambda a, b: a * eager_on_graph(lambda x: (x * 1, bool(x.sum() > 0)))(b)[1],
}
RANDOM: dict[str, Binary] = {
    "rand": lambda a, _: a + torch.rand_like(a),
    "dropout": lambda a, _: F.dropout(a, 0.25),
    "normal_": lambda a, b: b - torch.empty_like(a).normal_(),
    "break rand": eager_on_graph(lambda a, b: a + torch.randn(N, device=a.device) * b),
}
OPERATIONS = PLAIN | VIEWS | IN_PLACE | CONSTANTS | BREAKS | READS | RANDOM
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t.clone(),
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand(N, N),
    "strided": lambda t: t.repeat(2, 2)[::2, 1::2],
}


class Pair(NamedTuple):
    """A container of its own type."""

    first: Any
    second: Any


@dataclass
class Packed:
    """Another one."""

    value: Any
    rest: Any = None


ARGUMENTS: dict[str, tuple[int, Callable[[list[Tensor]], dict[str, Any]]]] = {
    "one": (1, lambda t: {"x": t[0]}),
    "two": (2, lambda t: {"x": t[0], "y": t[1], "flag": True}),
    "nested": (3, lambda t: {"x": [t[0], None], "y": {"a": (t[1],), "b": {"c": t[2]}}, "n": 1.5}),
    "nested types": (3, lambda t: {"x": Pair(t[0], Packed(t[1], "text")), "y": OrderedDict(a=[Pair((), t[2])])}),
    "aliased": (2, lambda t: {"x": t[0], "y": [t[1], t[0]]}),
    "overlapping": (2, lambda t: {"x": t[0], "y": t[0].t(), "z": t[1]}),
}
RESULTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "last": lambda r: r[-1],
    "tuple": lambda r: (r[-1], r[0], r[-1]),
    "tree": lambda r: {"a": [r[-1], 3], "b": (r[len(r) // 2], None)},
    "types": lambda r: Pair(Packed(r[-1], [r[0]]), OrderedDict(a=r[len(r) // 2])),
    "view": lambda r: [r[-1].t(), r[-1][1:, :2], r[-1]],
}


@dataclass(frozen=True)
class Program:
    """Operations with the registers that they take, and the forms of arguments and result."""

    steps: list[tuple[str, int, int]]
    arguments: str = "two"
    layouts: tuple[str, ...] = ("dense",) * 3
    result: str = "last"

    def inputs(self, seed: int, device: torch.device = CPU) -> dict[str, Any]:
        """Fresh arguments, of equal values on every device."""
        generator = torch.Generator().manual_seed(seed)
        count, form = ARGUMENTS[self.arguments]
        made = [torch.randn(N, N, generator=generator).to(device) for _ in range(count)]
        return form([LAYOUTS[layout](t) for layout, t in zip(self.layouts, made, strict=False)])

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Run on arguments. Registers are the arguments and all results so far; writes go to late ones."""
        registers = trees.tensors(arguments)
        fresh = [registers[0] + 1]
        for name, a, b in self.steps:
            everything = registers + fresh
            first = fresh if name in IN_PLACE or name == "break write" else everything
            fresh.append(OPERATIONS[name](first[-1 - a % len(first)], everything[-1 - b % len(everything)]))
        return RESULTS[self.result](fresh)

    @property
    def traits(self) -> set[str]:
        """What it has, for counting."""
        names = [name for name, _, _ in self.steps]
        groups = {"break": BREAKS, "view": VIEWS, "write in place": IN_PLACE, "constant": CONSTANTS, "host read": READS,
                  "random": RANDOM}  # fmt: skip
        found = {trait for trait, group in groups.items() if any(name in group for name in names)}
        found |= {"aliased arguments"} if self.arguments in {"aliased", "overlapping"} else set()
        found |= {"nested arguments"} if self.arguments.startswith("nested") else set()
        found |= {"nested result"} if self.result in {"tree", "types"} else set()
        shared = {"view", "write in place"} <= found and names[-1] not in VIEWS
        return found | ({"write and view"} if shared else set())


def steps(*groups: dict[str, Binary]) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Operations drawn evenly from the groups, so that no large group drowns a small one."""
    name = st.one_of(*[st.sampled_from(sorted(group)) for group in groups])
    return st.lists(st.tuples(name, st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


def programs(*groups: dict[str, Binary]) -> st.SearchStrategy[Program]:
    """Programs over these groups of operations."""
    layouts = st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3)
    return st.builds(Program, steps=steps(*groups), arguments=st.sampled_from(sorted(ARGUMENTS)), layouts=layouts,
                     result=st.sampled_from(sorted(RESULTS)))  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Equal trees, bit for bit."""
    (leaves, spec), (others, other_spec) = trees.flatten(a), trees.flatten(b)
    return spec == other_spec and all(map(same_value, leaves, others))


def run(function: Callable[[dict[str, Any]], Any], program: Program, seed: int, device: torch.device = CPU) -> Any:
    """Call on fresh arguments with the generator seeded alike."""
    torch.manual_seed(seed)
    return function(program.inputs(seed, device))


def check(program: Program, device: torch.device = CPU, *, tally: Counter[str] | None = None) -> GraphedForward | None:
    """The engine after four calls that answered like eager; None if the capture was refused for a good reason.

    The program's traits and its end are hypothesis events, and are counted in `tally`.
    """
    with torch.no_grad():
        try:
            expected = [run(program, program, seed, device) for seed in (0, 1, 2)]
        except (RuntimeError, UserWarning):  # a write to an expanded matrix: no program
            assume(condition=False)
        engine = GraphedForward(program, device=device, policy=BreakPolicy())
        try:
            engine.prepare(program.inputs(0, device))
        except CaptureError as error:
            if "writes to its tensor argument" not in str(error):
                raise
            _note({"refused: writes to its argument"}, tally)
            return None
        got = [(seed, run(engine, program, seed, device)) for seed in (1, 2, 2, 1)]
    for seed, output in got:  # after the last call: an output must survive the next replay
        assert same(output, expected[seed])
    assert engine.replays + engine.fallbacks == 4
    _note(program.traits | {"replayed" if engine.replays else "only misses"}, tally)
    return engine


def _note(traits: set[str], tally: Counter[str] | None) -> None:
    for trait in sorted(traits) if currently_in_test_context() else ():
        event(trait)
    if tally is not None:
        tally.update(traits | {"all"})


def replayed(program: Program, device: torch.device = CPU, *, tally: Counter[str] | None = None) -> None:
    """As `check`, and every call was a replay."""
    engine = check(program, device, tally=tally)
    assert engine is None or engine.fallbacks == 0
