"""Settings that every test shares: offline, few threads, repeatable property tests, GPU tests skipped with a reason.

Fixtures for one module stand in its own test file.
"""

from __future__ import annotations

import os

# Read when torch and huggingface_hub are first imported, so set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # on tensors this small threads only wait for each other

import pytest
from hypothesis import settings

# No deadline: a first call that imports torch, or a busy machine, is no bug. Derandomized: a commit gives the same
# result everywhere; what looks for new failures is `make programs`.
settings.register_profile("fixed", deadline=None, max_examples=50, derandomize=True, database=None, print_blob=True)
# Random programs by the thousand: `make programs`. Chosen by pytest's --hypothesis-profile, which comes after this.
settings.register_profile("programs", deadline=None, max_examples=400, print_blob=True)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where torch finds no CUDA device; torch is imported only if there are any."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device; torch {torch.__version__} finds none"
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=reason))
