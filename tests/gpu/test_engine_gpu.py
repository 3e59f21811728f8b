"""The engine on a real GPU: what the tape cannot see (lifetime, memory pool, streams, generator, failed captures)."""

import gc
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bcgbench.engine import breaks, driver, segments
from bcgbench.engine.breaks import BreakPolicy, eager_on_graph
from bcgbench.engine.bridge import Bridge
from bcgbench.engine.buffers import Address
from bcgbench.engine.cache import Limits
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.options import DEFAULT, Options
from bcgbench.engine.segments import CudaSegment
from bcgbench.engine.tape import backend_for
from bcgbench.errors import CaptureError
from bcgbench.runners import ONE_OFF

pytestmark = pytest.mark.gpu
WIDTH = 256


class Block(nn.Module):
    """Attention and MLP with residuals, the shape of a DiT block."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Net(nn.Module):
    """A stack of blocks behind one tensor argument."""

    def __init__(self, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return (x * scale,)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().to("cuda", torch.bfloat16).eval()


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def graphed(module, policy="attention", **limits):
    return GraphedForward(lambda arguments: module(**arguments), device=torch.device("cuda"), module=module,
                          policy=BreakPolicy.parse(policy), limits=Limits(**limits))  # fmt: skip


def inputs(length=128, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return {"x": torch.randn(1, length, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)}


def churn():
    """Allocate and free, so that memory which nobody owns is overwritten."""
    for size in (1, 7, 63, 512, 4096):
        torch.full((size * 1024,), float("nan"), device="cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("policy", ["attention", "none"])
def test_replay_is_bit_exact_on_fresh_inputs_in_every_bucket_order(net, policy):
    """Graphs of three lengths share a pool and replay exactly in any order, with the allocator churned in between."""
    engine = graphed(net, policy)
    lengths = [256, 128, 64]
    for length in lengths:
        engine.prepare(inputs(length))
    engine.freeze()
    for seed, length in enumerate([*lengths, *reversed(lengths), 128, 256, 64]):
        churn()
        call = inputs(length, seed + 1)
        assert torch.equal(engine(call)[0], net(**call)[0])
    assert engine.fallbacks == 0


def test_segmented_memory_is_that_of_a_whole_graph():
    """Bridges in the pool and borrowed break inputs: growth at most 5 % above graphs without breaks, in all buckets."""
    torch.manual_seed(0)
    net = Net(depth=12).to("cuda", torch.bfloat16).eval()
    grown = {}
    for policy in ("none", "attention"):
        engine = graphed(net, policy)
        for length in (8192, 4096, 512):
            engine.prepare(inputs(length))
        grown[policy] = engine.backend.pool_bytes()
    assert grown["attention"] <= 1.05 * grown["none"], grown


def test_growth_is_the_graphs_own(net):
    """The cuBLAS workspace of eager calls, 34 MB that a capture drops, was credited to whatever was captured first."""
    net(**inputs(512))
    engines = [graphed(net, "none") for _ in range(2)]
    for engine in engines:
        engine.prepare(inputs(512))
    first, second = (engine.growth_bytes[0] for engine in engines)
    assert abs(first - second) < 4 << 20, (first, second)


def test_two_modules_share_one_pool(net):
    """Two denoisers that run one after the other take the memory of one, and stay exact."""
    other = Net().to("cuda", torch.bfloat16).eval()
    backend = backend_for(torch.device("cuda"))
    both = [GraphedForward(lambda arguments, module=module: module(**arguments), device=torch.device("cuda"),
                           module=module, policy=BreakPolicy.parse("attention"), backend=backend)
            for module in (net, other)]  # fmt: skip
    both[0].prepare(inputs(2048))
    alone = backend.pool_bytes()
    both[1].prepare(inputs(2048))
    assert backend.pool_bytes() <= 1.05 * alone
    for seed in range(3):
        churn()
        call = inputs(2048, seed)
        got = [engine(call)[0] for engine in both]
        assert torch.equal(got[0], net(**call)[0])
        assert torch.equal(got[1], other(**call)[0])


def test_outputs_survive_the_next_replay(net):
    """The output of one call is a copy: the next replay does not overwrite it."""
    engine = graphed(net)
    engine.prepare(inputs())
    first = engine(inputs(seed=1))[0]
    kept = first.clone()
    engine(inputs(seed=2))
    assert torch.equal(first, kept)


def test_break_output_that_nobody_owns_is_caught(net, monkeypatch):
    """Injected fault (sglang#30584): the next segment reads the break's own output, freed after the break."""

    def unowned(_self, result):
        return result, Bridge(Address.of(result))

    monkeypatch.setattr(CudaSegment, "bridge", unowned)
    monkeypatch.setattr(Bridge, "fill", lambda _self, _result: None)
    engine = graphed(net)
    engine.prepare(inputs())
    churn()
    call = inputs(seed=3)
    assert not torch.equal(engine(call)[0], net(**call)[0])


def test_dropped_bridge_copy_is_caught(net, monkeypatch):
    """Injected fault: a break's output is not copied to where the next segment reads it; capture itself refuses."""
    monkeypatch.setattr(Bridge, "fill", lambda _self, _result: None)
    engine = graphed(net)
    with pytest.raises(CaptureError, match="first differing module"):
        engine.prepare(inputs())


WAYS = {
    "elsewhere": lambda x, kept: kept.append(x * 2) or kept[-1],  # nothing is freed: another address at each replay
    "in another order": lambda x, _: (x * 2).transpose(-1, -2).contiguous().transpose(-1, -2),
    "inside of another": lambda x, _: F.pad(x * 2, (0, 0, 1, 1))[:, 1:-1],
    "off a word": lambda x, _: torch.cat((x.flatten()[:1], (x * 2).flatten()))[1:].view_as(x),
    "expanded": lambda x, _: (x * 2)[:, :1].expand_as(x),
    "on the host": lambda x, _: (x * 2).cpu(),
}


@pytest.mark.parametrize("off", [(), ("pulled_outputs",)])
@pytest.mark.parametrize("captured", list(WAYS)[:-2])
def test_a_breaks_output_is_read_wherever_it_lies(captured: str, off: tuple[str, ...]):
    """Captured in one way and returned in every other, of whole words and not; all rows are equal, so also expanded."""
    for length in (8, 7):
        kept, way = [], [captured]
        cut = eager_on_graph(lambda x, kept=kept, way=way: WAYS[way[0]](x, kept))
        engine = GraphedForward(lambda arguments, cut=cut: cut(arguments["x"] + 1) * 3, device=torch.device("cuda"),
                                policy=BreakPolicy(), options=DEFAULT.without(*off))  # fmt: skip
        x = torch.ones(2, length, length, device="cuda", dtype=torch.bfloat16)
        engine.prepare({"x": x})
        for way[0] in [*WAYS, *WAYS]:
            churn()
            x = x + 1
            assert torch.equal(engine({"x": x}), (x + 1) * 2 * 3), way


@pytest.mark.parametrize("cells", [1, 2])
def test_more_breaks_than_there_are_places_for_addresses_copy_by_themselves(net, monkeypatch, cells):
    """The first segments copy, the rest is copied by the breaks."""
    monkeypatch.setattr("bcgbench.engine.pull._MOST_CELLS", cells)
    engine, other = graphed(net), inputs(seed=1)
    graph = engine.prepare(inputs())
    assert graph.breaks > cells
    churn()
    assert torch.equal(engine(other)[0], net(**other)[0])


def test_a_result_is_let_go_once_its_segment_was_launched(net):
    """Results of breaks are not held to the end of the step, let alone the next."""
    engine = graphed(net)
    graph = engine.prepare(inputs())
    engine(inputs(seed=1))
    bridges = [bridge for step in graph.steps for _, bridge in getattr(step, "bridges", [])]
    assert bridges
    assert all(bridge._handed is None for bridge in bridges)


def test_host_constants_are_hoisted(net):
    """Host values turned into device tensors inside a forward are legal in a capture (they are not in plain torch)."""

    def forward(arguments):
        x = arguments["x"]
        scale = torch.tensor([2.0, 3.0], device="cuda") + torch.as_tensor(1, device="cuda")
        table = torch.arange(WIDTH, dtype=torch.float32).to("cuda")
        scale.add_(1)  # writing to a constant must not accumulate over replays
        return net(x * scale[0].to(x.dtype) + table.to(x.dtype))

    engine = GraphedForward(forward, device=torch.device("cuda"), module=net, policy=BreakPolicy.parse("attention"))
    engine.prepare(inputs())
    for seed in (1, 2, 3):
        call = inputs(seed=seed)
        assert torch.equal(engine(call)[0], forward(call)[0])
    assert engine.replays == 3


def test_host_reads_are_guarded():
    """A branch on data replays while the value holds, and is a counted miss when it does not."""

    def forward(arguments):
        x = arguments["x"] * 2
        return x + 1 if x.sum().item() > 0 else x - 1

    engine = GraphedForward(forward, device=torch.device("cuda"), policy=BreakPolicy.parse("none"))
    ones = {"x": torch.ones(4, device="cuda")}
    engine.prepare(ones)
    assert engine(ones).tolist() == [3.0] * 4
    assert engine({"x": torch.zeros(4, device="cuda")}).tolist() == [-1.0] * 4
    assert (engine.replays, engine.fallbacks) == (1, 1)
    assert "host read at item" in next(iter(engine.cache.misses.values())).reason


def test_state_on_the_host_is_refused():
    """A graph repeats no work of the host: a count kept there would stand still at replay."""
    count = torch.zeros(())

    def forward(arguments):
        count.add_(1)
        return arguments["x"] * 2

    engine = GraphedForward(forward, device=torch.device("cuda"), policy=BreakPolicy.parse("none"))
    with pytest.raises(CaptureError, match="writes to a tensor of the host"):
        engine.prepare({"x": torch.ones(4, device="cuda")})


def test_failed_capture_leaves_the_process_usable(net):
    """A synchronise inside a capture invalidates it: afterwards memory, generator, older and new graphs still work."""
    engine = graphed(net)
    engine.prepare(inputs())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    state = torch.cuda.get_rng_state()

    def illegal(arguments):
        x = net(**arguments)[0] + torch.rand(1, device="cuda")
        torch.cuda.synchronize()
        return (x,)

    bad = GraphedForward(illegal, device=torch.device("cuda"), module=net, policy=BreakPolicy.parse("attention"))
    with pytest.raises(CaptureError, match="test_engine_gpu"):
        bad.prepare(inputs())
    del bad
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.rand(4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + 64 * 2**20
    call = inputs(seed=5)
    assert torch.equal(engine(call)[0], net(**call)[0])
    engine.prepare(inputs(64))
    call = inputs(64, seed=6)
    assert torch.equal(engine(call)[0], net(**call)[0])


@pytest.mark.parametrize("first", [lambda x: float(x[0, 0, 0]) * 0, eager_on_graph(lambda x: x * 2)])
def test_a_forward_may_begin_with_eager_work(first):
    """Nothing runs in the first segment; dropped with its graph, the new pool would be refused by torch 2.11."""
    engine = GraphedForward(lambda arguments: first(arguments["x"]) + arguments["x"], device=torch.device("cuda"),
                            policy=BreakPolicy.parse("attention"))  # fmt: skip
    call = {"x": torch.ones(1, 256, 128, device="cuda")}
    engine.prepare(call)
    assert torch.equal(engine(call), first(call["x"]) + call["x"])
    assert engine.fallbacks == 0


def test_what_was_dropped_can_be_captured_again_in_the_same_memory(net):
    """A pool of which no graph is left serves the next ones, and does not grow."""
    engine = graphed(net)
    engine.prepare(inputs())
    before = engine.backend.pool_bytes()
    engine.cache.drop_all("a test")
    churn()
    engine.prepare(inputs())
    call = inputs(seed=2)
    assert torch.equal(engine(call)[0], net(**call)[0])
    assert engine.backend.pool_bytes() == before


def test_a_graph_owns_the_workspaces_of_its_matrix_products(net):
    """torch drops all of them when torch.compile records a graph of its own, and their memory goes to others."""
    net.blocks[0].mlp[2] = wide = nn.Linear(4 * WIDTH, WIDTH).to("cuda", torch.bfloat16)
    net.blocks[0].mlp.append(nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)).to(wide.weight))
    engine = graphed(net)
    engine.prepare(inputs(16))
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == held
    torch.cuda.empty_cache()
    for seed in range(3):
        churn()
        call = inputs(16, seed)
        assert torch.equal(engine(call)[0], net(**call)[0])


def test_failed_capture_in_the_same_pool_leaves_older_graphs_exact(net):
    """The pool that a failed capture shared goes on serving (pytorch#180395)."""
    fail = {"now": False}

    def forward(arguments):
        out = net(**arguments)
        if fail["now"]:
            torch.cuda.synchronize()
        return out

    engine = GraphedForward(forward, device=torch.device("cuda"), module=net, policy=BreakPolicy.parse("attention"))
    engine.prepare(inputs(128))
    fail["now"] = True
    with pytest.raises(CaptureError):
        engine.prepare(inputs(64))
    fail["now"] = False
    engine.prepare(inputs(64))
    for length in (128, 64, 128):
        churn()
        call = inputs(length, seed=length)
        assert torch.equal(engine(call)[0], net(**call)[0])


def test_capture_draws_nothing_and_replays_draw_afresh():
    """Preparation leaves the generator where it was; replays advance it like eager calls, draw for draw."""

    def forward(arguments):
        return arguments["x"] + torch.rand_like(arguments["x"])

    engine = GraphedForward(forward, device=torch.device("cuda"), policy=BreakPolicy.parse("none"))
    call = {"x": torch.zeros(1024, device="cuda")}
    torch.manual_seed(3)
    engine.prepare(call)
    got = [engine(call) for _ in range(2)]
    torch.manual_seed(3)
    assert torch.equal(got[0], forward(call))
    assert torch.equal(got[1], forward(call))


def test_side_streams_are_joined_at_every_segment_end():
    """Work forked to another stream across a break is part of the graph and finished before the next segment."""
    side = torch.cuda.Stream()

    def forward(arguments):
        x = arguments["x"]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x @ x
        breaks.break_graph()
        with torch.cuda.stream(side):
            y = y @ x
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    engine = GraphedForward(forward, device=torch.device("cuda"), policy=BreakPolicy.parse("none"))
    call = {"x": torch.randn(512, 512, device="cuda") / 16}
    graph = engine.prepare(call)
    assert graph.segments == 2
    fresh = {"x": torch.randn(512, 512, device="cuda") / 16}
    assert torch.equal(engine(fresh), forward(fresh))


def test_evicting_one_graph_leaves_the_others_exact(net):
    """cuBLAS workspaces are keyed by stream and cleared on reset (pytorch#193402): evict one, replay the others."""
    engine = graphed(net, entries=2)
    for length in (256, 128, 64):
        engine.prepare(inputs(length))
    assert engine.cache.evictions == 1
    for length in (128, 64):
        churn()
        call = inputs(length, seed=9)
        assert torch.equal(engine(call)[0], net(**call)[0])


def test_host_inputs_get_device_buffers(net):
    """A CPU tensor argument is copied to the device at each call where its value changed."""
    engine = GraphedForward(lambda a: net(a["x"] * a["t"].to("cuda", torch.bfloat16)), device=torch.device("cuda"),
                            module=net, policy=BreakPolicy.parse("attention"))  # fmt: skip
    engine.prepare({**inputs(), "t": torch.tensor([1.0])})
    call = {**inputs(seed=1), "t": torch.tensor([0.5])}
    assert torch.equal(engine(call)[0], net(call["x"] * 0.5)[0])


def test_non_owning_view_reads_bf16_bool_and_strided_memory():
    """An address gives back the tensor for every dtype width and stride."""
    for dtype in (torch.bfloat16, torch.bool, torch.float32, torch.int64, torch.uint8, torch.complex64):
        tensor = torch.arange(24, device="cuda").to(dtype).reshape(4, 6)[:, ::2]
        assert torch.equal(Address.of(tensor).view(), tensor)


def test_segments_module_names_are_stable():
    """The backend on a GPU is CUDA graphs, so that no test here passes on a tape."""
    assert segments.CudaBackend(torch.device("cuda")).name == "cuda"


@torch.library.custom_op("bcgbench_test::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    """Doubles, and waits for the device."""
    torch._C._cuda_synchronize()  # as a library does, past the function that can be patched
    return x * 2


def automatic(forward, module=None):
    return GraphedForward(forward, device=torch.device("cuda"), module=module, policy=BreakPolicy.parse("auto"))


def test_auto_runs_masked_indexing_between_segments(net):
    """One graph for every mask, none and all included, with memory churned in between; the rest of the net replays."""

    def forward(arguments):
        x = net.blocks[0](arguments["x"])
        kept = x[~arguments["mask"]]
        x[arguments["mask"]] *= 0.0
        x = net.blocks[1](x)
        return x, kept, net.blocks[2](x - kept.float().sum().to(x.dtype) * 2**-10)

    engine = automatic(forward, net)
    masks = [torch.arange(128, device="cuda")[None] % 5 < limit for limit in (0, 5, 2, 4)]
    graph = engine.prepare({**inputs(), "mask": masks[0]})
    engine.freeze()
    assert (graph.segments, graph.breaks) == (3, 2)
    for seed, mask in enumerate([*masks, *reversed(masks)]):
        churn()
        call = {**inputs(seed=seed), "mask": mask}
        for got, want in zip(engine(call), forward(call), strict=True):
            assert torch.equal(got, want)
    assert engine.fallbacks == 0


def test_auto_breaks_at_what_is_really_illegal(net):
    """A synchronising operation, a copy from pageable memory, indices on the host, a bare synchronise."""
    table = torch.randn(WIDTH)

    def forward(arguments):
        x = waits(net.blocks[0](arguments["x"]))
        bias = torch.empty(WIDTH, device="cuda")
        bias.copy_(table)
        x = net.blocks[1](x + bias.to(x.dtype))
        torch.cuda.synchronize()
        return x[:, torch.arange(8).flip(0)] + 1

    engine = automatic(forward, net)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    graph = engine.prepare(inputs())
    names = " ".join(graph.break_names)
    assert all(name in names for name in ("waits", "copy_", "synchronize", "__getitem__")), names
    assert graph.breaks == 4
    engine.freeze()
    for seed in (1, 2, 3):
        table.normal_()
        churn()
        call = inputs(seed=seed)
        assert torch.equal(engine(call), forward(call))
    assert engine.replays == 3
    torch._C._cuda_clearCublasWorkspaces()  # that of the eager calls
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + 64 * 2**20, "failed attempts left memory behind"


def test_auto_refuses_host_data_that_each_call_makes_anew(net):
    """A break would go on copying what the capture drew."""

    def forward(arguments):
        return net(arguments["x"] + torch.randn(WIDTH).to("cuda", torch.bfloat16))

    engine = automatic(forward, net)
    with pytest.raises(CaptureError, match="differently in each call"):
        engine.prepare(inputs())
    call = inputs(seed=1)
    clean = automatic(lambda arguments: net(**arguments), net)
    clean.prepare(inputs())
    assert torch.equal(clean(call)[0], net(**call)[0])


def test_equal_host_constants_share_one_tensor():
    """GLM-Image sends two RoPE tables to the device 120 times per forward."""
    tables = [torch.randn(1024, 1024), torch.randn(1024, 1024)]

    def forward(arguments):
        x = arguments["x"]
        for number in range(40):
            x = x + (tables[number % 2] * 1.0).to("cuda")[0, 0]
        return x

    engine = automatic(forward)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine.prepare({"x": torch.ones(4, device="cuda")})
    assert torch.cuda.memory_allocated() - before < 32 * 2**20
    call = {"x": torch.full((4,), 2.0, device="cuda")}
    assert torch.equal(engine(call), forward(call))
    assert engine.replays == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_replays_glm_image_as_diffusers_calls_it(dtype):
    """Its RoPE goes to the device 120 times per forward at full size, its prior is dropped by indexing with a mask."""
    from tests.engine.test_auto_models import check_glm_image

    check_glm_image(dtype, "cuda")


def test_auto_replays_lumina2_as_diffusers_calls_it():
    """Its host read is a guard between two graphs."""
    from tests.engine.test_auto_models import check_lumina2

    check_lumina2("cuda")


class MaskedNet(nn.Module):
    """Attention over the rows that a boolean mask admits, as under a length policy with buckets."""

    def __init__(self, depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth))

    def forward(self, x, mask):
        for block in self.blocks:
            q, k, v = block(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
            x = x + out.transpose(1, 2).flatten(2)
        return x


def masked(length=256, rows=200, seed=0):
    return {**inputs(length, seed), "mask": torch.arange(length, device="cuda")[None] < rows}


@pytest.fixture
def masked_net():
    torch.manual_seed(0)
    return MaskedNet().to("cuda", torch.bfloat16).eval()


def without(module, *off, policy="attention"):
    return GraphedForward(lambda arguments: module(**arguments), device=torch.device("cuda"), module=module,
                          policy=BreakPolicy.parse(policy), options=DEFAULT.without(*off))  # fmt: skip


@pytest.mark.parametrize("off", [(), *[(field.name,) for field in fields(Options)], ONE_OFF["bcg-sglang"].without])
def test_the_engine_without_an_idea_is_exact(masked_net, off):
    """On masked attention, for every prompt length, memory churned in between."""
    engine = without(masked_net, *off)
    for length in (256, 128):
        engine.prepare(masked(length))
    for seed, (length, rows) in enumerate([(256, 1), (128, 128), (256, 256), (128, 7), (256, 200)]):
        churn()
        call = masked(length, rows, seed)
        assert torch.equal(engine(call), masked_net(**call))
    assert (engine.replays, engine.fallbacks) == (5, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_break_at_attention_is_one_kernel_and_one_copy(masked_net, mode):
    """What makes an additive mask of the boolean one is in the segments: launches are graphs, kernels and copies."""
    from torch.profiler import ProfilerActivity, profile

    launches = {}
    with mode():
        for off in ((), ("kernel_breaks",)):
            engine, call = without(masked_net, *off), masked()
            engine.prepare(call)
            engine(call)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as traced:
                engine(call)
                torch.cuda.synchronize()
            calls = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaGraphLaunch")
            launches[off] = sum(event.name.startswith(calls) for event in traced.events())
    assert launches[()] < launches["kernel_breaks",], launches
    assert launches[()] <= 4 * 7, launches


def test_best_times_both_forms_and_leaves_one(net):
    """The reason has both times; the pool of the form not taken is given back."""
    grown, engine, graph = {}, None, None
    for policy in ("none", "best"):
        del engine, graph
        gc.collect()
        torch.cuda.empty_cache()
        before = driver.private_bytes()
        engine = graphed(net, policy)
        graph = engine.prepare(inputs(2048))
        grown[policy] = driver.private_bytes() - before
        call = inputs(2048, seed=1)
        assert torch.equal(engine(call)[0], net(**call)[0])
        assert engine.replays == graph.replays == 1
    assert "ms with" in engine.chosen
    assert grown["best"] <= 1.1 * grown["none"], (grown, engine.chosen)


@pytest.mark.parametrize("policy", ["none", "attention"])
def test_equal_results_of_all_blocks_are_one_kernel(masked_net, policy):
    """The additive mask is made once, and lives until the last block has read it."""
    kernels = {}
    for off in ((), ("shared_results",)):
        engine = without(masked_net, *off, policy=policy)
        kernels[off] = engine.prepare(masked()).kernels
        for seed, rows in enumerate((1, 256, 77)):
            churn()
            call = masked(rows=rows, seed=seed)
            assert torch.equal(engine(call), masked_net(**call))
    assert kernels[()] <= kernels["shared_results",] - 5 * 3, kernels


def test_nothing_is_shared_once_there_is_a_side_stream():
    """Work on it could run before the work that made the first of two equal results."""
    side = torch.cuda.Stream()

    def forward(arguments):
        x = arguments["x"]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(20):
                x = x @ arguments["x"]
            first = x.sum() + F.silu(arguments["t"])
        second = F.silu(arguments["t"]) * 2
        torch.cuda.current_stream().wait_stream(side)
        return first + second

    engine = GraphedForward(forward, device=torch.device("cuda"), policy=BreakPolicy.parse("none"))
    for seed in range(5):
        torch.manual_seed(seed)
        call = {"x": torch.randn(1024, 1024, device="cuda") / 40, "t": torch.randn(8, device="cuda")}
        if seed == 0:
            engine.prepare(call)
        churn()
        assert torch.equal(engine(call), forward(call))
    assert engine.replays == 5
