"""Benchmark and validate diffusion transformers under breakable CUDA graphs."""

__version__ = "0.1.0"
