"""`validate` on CUDA graphs: no false alarm on tiny models, and little free memory is survived."""

import time

import pytest

from bcgbench import validate, validate_process
from bcgbench.types import Case

pytestmark = pytest.mark.gpu
PROMPTS = ("A small red cube on a white table", "cube " * 40)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", ["tiny/qwen-image", "tiny/z-image", "tiny/ltx-2"])
def test_a_sound_engine_passes_every_check(model: str, dtype: str):
    """As on the tape, with memory pressure and the lifetime of pools on top."""
    case = Case(model=model, width_px=64, height_px=64, frames=5 if "ltx" in model else None, steps=2, prompts=PROMPTS,
                dtype=dtype, device="cuda", rounds=1, runners=("bcg", "graph"))  # fmt: skip
    names = [name for name in validate.CHECKS if name != "fresh-process"]
    found = list(validate.run_checks(case, runners=case.runners, names=names))
    assert [(each.runner, each.check, each.reason) for each in found if each.ruling == "FAILED"] == []
    assert {each.check for each in found if each.ruling == "OK"} >= {"memory-pressure", "order", "weights"}


def test_a_kernel_that_does_not_end_is_a_finding():
    """A break launches it: whatever check waits for it hangs, `steps` names the break, and the process is killed."""
    case = Case(model="tiny/qwen-image", width_px=32, height_px=32, steps=2, prompts=PROMPTS[:1], dtype="float32",
                device="cuda", rounds=1, runners=("bcg",))  # fmt: skip
    began_s = time.monotonic()
    hung, steps = validate_process.run_checks(case, runners=["bcg"], names=["order", "steps"], limit_s=8.0,
                                              target="tests.fake_validate:kernel_hangs")  # fmt: skip
    assert hung.ruling == steps.ruling == "FAILED"
    assert hung.reason.startswith("no forward ended within 8 s: ")
    assert "the break" in steps.reason
    assert "transformer_blocks.1.attn" in steps.reason
    assert time.monotonic() - began_s < 120
