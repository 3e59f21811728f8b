"""A length policy that is wrong is caught by the tool itself, for every model: padded by something outside the policy.

Each of these paddings looks plausible, and a graph replays each bit-exactly: only the comparison of eager with eager
on the padded inputs shows it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bcgbench import models
from bcgbench.models.base import Adapter, Arguments
from bcgbench.models.padding import pad_to
from bcgbench.verdict import compare
from tests.models.test_contract import tiny_case
from tests.running import records_of

Wrong = Callable[[Arguments], Arguments]
PROMPTS = ("A small red cube on a white table", 'A glass observatory at sunrise with a sign "OPEN"')


def longer(arguments: Arguments, *names: str, rows: int, dim: int = 1, value: float = 0) -> Arguments:
    """Some arguments extended by rows."""
    present = {name: arguments[name] for name in names}
    return {name: pad_to(part, length=part.shape[dim] + rows, dim=dim, value=value) for name, part in present.items()}


def qwen_without_its_mask(call: Arguments) -> Arguments:
    return call | {"encoder_hidden_states": pad_to(call["encoder_hidden_states"], length=64, dim=1)}


def z_image_in_a_bucket_of_64(call: Arguments) -> Arguments:
    return call | {"cap_feats": [pad_to(caption, length=64, dim=0) for caption in call["cap_feats"]]}


def glyphs_in_a_bucket_of_64(call: Arguments) -> Arguments:
    return call | {"encoder_hidden_states": pad_to(call["encoder_hidden_states"], length=64, dim=1)}


def ideogram_without_its_segments(call: Arguments) -> Arguments:
    return call | {"segment_ids": torch.ones_like(call["segment_ids"])}


def sana_without_its_mask(call: Arguments) -> Arguments:
    return call | {"encoder_attention_mask": torch.ones_like(call["encoder_attention_mask"])}


def ltx_in_more_rows(call: Arguments) -> Arguments:
    texts = longer(call, "encoder_hidden_states", "audio_encoder_hidden_states", rows=256)
    return call | texts | longer(call, "encoder_attention_mask", "audio_encoder_attention_mask", rows=256, value=1)


def longcat_in_more_rows(call: Arguments) -> Arguments:
    return call | longer(call, "encoder_hidden_states", rows=64) | longer(call, "txt_ids", rows=64, dim=0)


def minimax_text_alone(call: Arguments) -> Arguments:
    """Pad rows are written where a video row overwrites them: the sequence keeps its length, the refiner sees them."""
    texts = longer(call, "encoder_hidden_states", rows=32)
    onto = int(call["video_indices"].flatten()[0])
    return call | texts | longer(call, "text_indices", rows=32, dim=call["text_indices"].dim() - 1, value=onto)


WRONG: dict[str, Wrong] = {
    "tiny/qwen-image": qwen_without_its_mask,
    "tiny/qwen-image-2512": qwen_without_its_mask,
    "tiny/z-image": z_image_in_a_bucket_of_64,
    "tiny/z-image-turbo": z_image_in_a_bucket_of_64,
    "tiny/glm-image": glyphs_in_a_bucket_of_64,
    "tiny/ideogram-4": ideogram_without_its_segments,
    "tiny/sana1.5": sana_without_its_mask,
    "tiny/sana-video": sana_without_its_mask,
    "tiny/ltx-2": ltx_in_more_rows,
    "tiny/ltx-2.3": ltx_in_more_rows,
    "tiny/ltx-2-two-stage": ltx_in_more_rows,
    "tiny/longcat-image": longcat_in_more_rows,
    "tiny/minimax-h3": minimax_text_alone,
}


def test_every_model_has_its_wrong_padding():
    """A new model brings one."""
    assert set(WRONG) == {name for name in models.MODELS if models.facts(name).tiny}


@pytest.mark.parametrize("model", WRONG)
def test_padding_outside_the_policy_is_caught(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Exit code 3 and the reason, in float32, from a run as a user would make it."""
    kind = type(models.adapter(model))

    def pad(self: Adapter, arguments: Arguments, **known: Any) -> Arguments:
        return WRONG[model](arguments)

    monkeypatch.setattr(kind, "pad", pad)
    monkeypatch.setattr(kind, "variants", Adapter.variants)
    case = replace(tiny_case(model, prompts=PROMPTS, rounds=1), runners=("eager", "eager-padded"))
    records = records_of(case, tmp_path)
    found = compare(records["eager"], records["eager-padded"])
    assert "padding-over-limit" in {reason.code for reason in found.reasons}, records["eager-padded"].reasons
    assert found.exit_code == 3
