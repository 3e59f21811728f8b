"""The segmented CUDA-graph engine. Knows torch and cuda-python; of bcgbench only its errors.

`GraphedForward` in `graphed.py` is the way in; `eager_on_graph` and `break_graph` mark breaks in a user's own code.
"""
