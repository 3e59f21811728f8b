"""What the fork server of `tests/ranks.py` imports once for all ranks."""

import diffusers.modular_pipelines.minimax_h3
from diffusers import LTX2Pipeline, ZImagePipeline

from bcgbench import bench_ranks, faults
from bcgbench.faults import ranks

__all__ = ["LTX2Pipeline", "ZImagePipeline", "bench_ranks", "diffusers", "faults", "ranks"]
