"""A miss says what to change on the command line."""

from __future__ import annotations

import pytest

from bcgbench.hints import hint
from bcgbench.types import Miss

NO_GRAPH = "no graph for this signature"


@pytest.mark.parametrize(
    ("reason", "difference", "expected"),
    [
        ("prompt has 70 tokens, the largest bucket is 64", (), "add a bucket of at least 70 to --buckets"),
        ("nothing was captured", (), "--break auto"),
        ("weights or switches changed after the capture (proj.weight); capture again", (), "before the run"),
        ("host read at item in proj (x.py:3): captured 1, now 2", (), "pass it as a tensor"),
        (NO_GRAPH, ("encoder_hidden_states: captured bfloat16[1, 64, 3584], asked bfloat16[1, 128, 3584]",),
         "add 128 to --buckets"),
        (NO_GRAPH, ("hidden_states: captured float32[1, 1024, 64], asked float32[1, 4096, 64]",), "--res"),
        (NO_GRAPH, ("hidden_states: captured float32[1, 1024, 64], asked float32[2, 1024, 64]",), "--guidance"),
        (NO_GRAPH, ("num_frames: captured 3, asked 16 latent frames",), "--res WxHxFRAMES"),
        (NO_GRAPH, ("(autocast): captured False, asked torch.bfloat16",),
         "autocast was False when captured and is torch.bfloat16 now"),
        (NO_GRAPH, ("guidance: captured None, asked 1.0",), ""),
    ],
)  # fmt: skip
def test_a_miss_names_the_change_that_would_fix_it(reason: str, difference: tuple[str, ...], expected: str):
    """Lengths, sizes, frames, batch and ambient state, each by its own option; nothing where none is known."""
    found = hint(Miss(module="transformer", reason=reason, difference=difference, count=1))
    assert expected in found if expected else found == ""
