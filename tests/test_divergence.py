"""Two arms that differ: the place is named. Each fault is put in on purpose, on the CPU; unbroken models show none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bcgbench import cli, divergence, divergence_modules, faults, models
from bcgbench.divergence import CaseDivergence, diverge
from bcgbench.divergence_align import Growth, alignments, contrast, differs, growths
from bcgbench.engine.steps import Break
from bcgbench.faults.places import replaced
from bcgbench.models import base
from bcgbench.models.base import Adapter
from bcgbench.types import Case
from tests.models.test_contract import tiny_case
from tests.models.test_wrong_padding import WRONG

BLOCK = "transformer_blocks.1.attn"


@pytest.fixture(scope="module")
def session() -> base.Session:
    """The tiny Qwen-Image with two prompts, guided: eight calls."""
    return base.load(qwen())


def qwen() -> Case:
    return tiny_case("tiny/qwen-image", guidance=4.0, prompts=("A red cube", "A glass observatory at sunrise, misty"))


@pytest.fixture
def loaded(session: base.Session, monkeypatch: pytest.MonkeyPatch) -> base.Session:
    """`diverge` finds this session already loaded."""
    monkeypatch.setattr(divergence.base, "load", lambda _case: session)
    return session


def found(*arms: str) -> CaseDivergence:
    return diverge(qwen(), arms=(arms[0], arms[1]))


# --- no divergence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arms", [("eager-padded", "bcg"), ("eager", "eager"), ("bcg", "graph")])
def test_an_unbroken_engine_does_not_diverge(arms: tuple[str, str], loaded: base.Session):
    """Every call and every step's latents have the same bytes."""
    result = found(*arms)
    assert (result.diverged, result.calls, result.calls_equal) == (False, 8, 8)
    assert (result.call, result.latents, result.module, result.replay, result.fallbacks) == (None,) * 4 + ((),)


@pytest.mark.parametrize("arms", [("eager", "eager-padded"), ("eager", "bcg")])
def test_right_padding_is_rounding(arms: tuple[str, str], loaded: base.Session):
    """In float32 it changes the last bits: said, and no divergence."""
    result = found(*arms)
    assert not result.diverged
    assert result.rounding_limit == 1e-4
    assert result.calls_equal < result.calls
    assert 0 < (result.rounding_seen or 0) < 1e-5


@pytest.mark.parametrize(
    ("model", "changes"),
    [("tiny/z-image", {}), ("tiny/ltx-2-two-stage", {}), ("tiny/qwen-image", {"break_policy": "auto"})],
)
def test_other_unbroken_models_do_not_diverge(model: str, changes: dict[str, str]):
    """Captions in lists; two denoise loops; breaks found while capturing."""
    assert not diverge(tiny_case(model, **changes), arms=("eager", "bcg")).diverged


# --- a module -------------------------------------------------------------------------------------------------------


@pytest.fixture
def off_when_padded(monkeypatch: pytest.MonkeyPatch, session: base.Session) -> None:
    """One attention adds 1e-3 to its first output, in arms that pad."""
    graphed = session.denoisers["transformer"].get_submodule(BLOCK)
    forward = graphed.forward

    def off(*args: Any, **kwargs: Any) -> Any:
        image, text = forward(*args, **kwargs)
        return image + (1e-3 if text.shape[1] == 32 else 0.0), text

    monkeypatch.setattr(graphed, "forward", off)


def test_a_block_that_is_off_is_named_with_its_values(loaded: base.Session, off_when_padded: None):
    """The module, the operation, the size of the difference and the floor, for an eager and a graphed arm."""
    for arm in ("eager-padded", "bcg"):
        result = found("eager", arm)
        assert result.diverged
        assert result.call is not None
        assert (result.call.call, result.call.prompt, result.call.step, result.call.branch) == (0, 0, 0, 0)
        assert result.module is not None
        assert (result.module.module, result.module.seen_at, result.module.kind) == (BLOCK, BLOCK, "Attention")
        assert result.module.operation == "aten::add"
        assert result.module.floor == 0
        assert result.module.contrast is not None
        assert result.module.contrast.difference.max_abs == pytest.approx(1e-3, rel=1e-2)
        assert result.replay is None


def test_a_capture_is_watched_under_auto_too(
    loaded: base.Session, off_when_padded: None, monkeypatch: pytest.MonkeyPatch
):
    """Watching adds no call to those that auto counts."""
    auto = replace(loaded, case=replace(loaded.case, break_policy="auto"))
    monkeypatch.setattr(divergence.base, "load", lambda _case: auto)
    result = found("eager", "bcg")
    assert result.module is not None
    assert result.module.module == BLOCK


def test_a_small_window_of_kept_outputs_finds_the_same(
    loaded: base.Session, off_when_padded: None, monkeypatch: pytest.MonkeyPatch
):
    """More passes, less memory: one output at a time is enough."""
    at_once = found("eager", "eager-padded")
    monkeypatch.setattr(divergence_modules, "WINDOW_BYTES", 1)
    one_by_one = found("eager", "eager-padded")
    assert one_by_one.module == at_once.module
    assert one_by_one.forwards > at_once.forwards


def test_a_forward_that_does_not_repeat_itself_has_a_floor(loaded: base.Session, monkeypatch: pytest.MonkeyPatch):
    """Eager against eager: the module, and that two eager runs differ there."""
    module = loaded.denoisers["transformer"].get_submodule(BLOCK)
    forward, drift = module.forward, iter(range(10**6))

    def noisy(*args: Any, **kwargs: Any) -> Any:
        image, text = forward(*args, **kwargs)
        return image + next(drift) * 1e-3, text

    monkeypatch.setattr(module, "forward", noisy)
    result = found("eager", "eager")
    assert result.module is not None
    assert result.module.module == BLOCK
    assert (result.module.floor or 0) > 1e-4


@pytest.mark.parametrize(
    ("model", "module", "operation"),
    [
        ("tiny/z-image", "context_refiner.0.attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("tiny/qwen-image", "transformer_blocks.0.attn", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("tiny/glm-image", "transformer_blocks.0.attn1", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("tiny/sana1.5", "transformer_blocks.0.attn2", None),
    ],
)
def test_wrong_padding_names_the_module_that_sees_pad_rows(
    model: str, module: str, operation: str | None, monkeypatch: pytest.MonkeyPatch
):
    """Z-Image in a bucket of 64 as in sglang#34218, where hand bisection ended at context_refiner.0."""
    kind = type(models.adapter(model))
    monkeypatch.setattr(kind, "pad", lambda _self, arguments, **_known: WRONG[model](arguments))
    monkeypatch.setattr(kind, "variants", Adapter.variants)
    result = diverge(tiny_case(model), arms=("eager", "eager-padded"))
    assert result.module is not None
    assert (result.module.module, result.module.operation) == (module, operation)
    assert result.module.inputs == (() if operation else ("attention_mask",))


# --- a replay -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "what", "where"),
    [
        ("stale-timestep", "input timestep", ""),
        ("dropped-bridge", "what break", "transformer_blocks.0.attn ("),
        ("lost-operation", "result of aten::rsqrt", "txt_norm ("),
        ("skipped-segment", "the replay as a whole", ""),
    ],
)
def test_a_replay_that_goes_wrong_is_told_from_a_capture(fault: str, what: str, where: str, loaded: base.Session):
    """Replay differs, capture does not: the first input, break or operation of the graph that is not as captured."""
    with faults.injected(fault):
        result = found("eager-padded", "bcg")
    assert result.diverged
    assert result.module is None
    assert result.replay is not None
    assert result.replay.new_capture == "right"
    assert result.replay.what.startswith(what), result.replay
    assert result.replay.where.startswith(where), result.replay


def test_a_replay_that_every_capture_gets_wrong_is_told_by_its_break(loaded: base.Session):
    """As where the next segment reads memory that nobody fills: a new capture's replay is no better."""

    def replay(original: Any, self: Break) -> None:
        original(self)
        for _, bridge in self.bridges:
            bridge.place.zero_()

    with replaced(Break, "replay", replay):
        result = found("eager-padded", "bcg")
    assert (result.diverged, result.module) == (True, None)
    assert result.replay is not None
    assert (result.replay.new_capture, result.replay.step) == ("alike", 1)
    assert "attention" in result.replay.what
    assert result.replay.what.endswith("hands on")
    assert result.replay.where.startswith("transformer_blocks.0.attn (")


def test_an_output_overwritten_after_its_call_shows_in_the_latents(loaded: base.Session):
    """Calls one by one are equal; run freely, guidance reads a prediction that the next call overwrote."""
    with faults.injected("uncloned-output"):
        result = found("eager-padded", "bcg")
    assert (result.diverged, result.call) == (True, None)
    assert result.latents is not None
    assert (result.latents.prompt, result.latents.step) == (0, 0)


# --- which rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("native", "padded", "length"),
    [
        ("ttiiii", "ttppiiii", 4),
        ("iiiitt", "iiiittpp", 4),
        ("tt", "ttpp", 4),
        ("ttriiii", "ttpppriiii", 6),
        ("iiiittr", "iiiittppp", 5),
        ("ttrttr", "ttpppttppp", 5),
    ],
)
def test_pad_rows_are_left_out_wherever_they_lie(native: str, padded: str, length: int):
    """t text, i image, p pad, r what the model itself rounds up with."""
    rows = {"t": 1.0, "i": 2.0, "p": 9.0, "r": 7.0}
    a, b = (torch.tensor([rows[kind] for kind in text])[None, :, None] for text in (native, padded))
    growth = Growth((2,), length)
    assert differs(alignments(a, b, (growth,)), rounding=False) is None
    wrong = b.clone()
    wrong[0, 0] += 1
    pair = differs(alignments(a, wrong, (growth,)), rounding=False)
    assert pair is not None
    assert contrast(pair, name="rows", rounding=False).index == (0, 0, 0)


def test_growths_read_the_padding_off_the_arguments():
    """Lists keep a length for each tensor."""
    native = {"caps": [torch.ones(3, 2), torch.ones(5, 2)], "text": torch.ones(1, 4, 2), "step": torch.ones(1)}
    padded = {"caps": [torch.ones(8, 2), torch.ones(8, 2)], "text": torch.ones(1, 6, 2), "step": torch.ones(1)}
    assert growths(native, padded) == (Growth((3, 5), 8), Growth((4,), 6))


# --- the command ----------------------------------------------------------------------------------------------------


def command(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["divergence", *args, "--model", "tiny/qwen-image", "--res", "32x32", "--steps",
                                        "2", "--quiet"])  # fmt: skip
    return done.exit_code, done.stdout


def test_the_command_prints_the_place_and_exits_with_3(loaded: base.Session, off_when_padded: None):
    """Text for a reader; the same as JSON."""
    code, text = command("eager", "eager-padded")
    assert code == 3
    for part in (BLOCK, "aten::add", "prompt 0, step 0, branch 0", "floor there: 0", "DIVERGED", "GB of host memory"):
        assert part in text
    code, text = command("eager", "eager-padded", "--json")
    assert code == 3
    assert json.loads(text)[0]["module"]["module"] == BLOCK


def test_the_command_exits_with_0_where_nothing_differs(loaded: base.Session):
    """And with 2 for arms that are no pair."""
    code, text = command()
    assert (code, "no divergence" in text) == (0, True)
    assert command("eager")[0] == 2


def test_a_fault_can_be_put_in():
    """As a demonstration: the caption in a bucket that the model does not round to."""
    code, text = command("eager", "eager-padded", "--model", "tiny/z-image", "-k", "z-image", "--fault", "wrong-bucket")
    assert (code, "context_refiner.0.attention" in text) == (3, True)
    assert command("--fault", "nothing-known")[0] == 2


def test_calls_without_a_graph_prove_nothing(loaded: base.Session):
    """Eager against eager is equal: exit code 4, with the reason."""
    with faults.injected("lost-graph"):
        code, text = command()
    assert (code, "no graph for this signature (16)" in text, "INVALID" in text) == (4, True, True)


def test_a_replay_is_shown_beside_its_capture(loaded: base.Session):
    """The stale input with both values."""
    with faults.injected("stale-timestep"):
        code, text = command()
    assert code == 3
    assert "replay    of bcg differs, capture does not" in text
    assert "inputs: input timestep" in text
