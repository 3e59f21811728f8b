"""Order, pairing and intervals for a handful of noisy times: pure functions over floats, standard library only.

Here: how samples are ordered, paired and summarised. Not here: what counts as faster (`verdict.py`), which number of
a record is summarised (`metrics.py`).

The unit is the image: steps of one image share clocks and allocator state, so treating them as independent finds
differences in A/A runs. Arms are interleaved because a slow drift then cancels within two rounds (duet benchmarking,
Bulej et al., arXiv:2001.05811); a longer back-to-back run only estimates the drift more precisely.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bcgbench.types import Interval

MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MEDIAN_PENALTY = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, normal data, large n."""


def median(xs: Sequence[float]) -> float:
    """Middle value, or the mean of the two middle values. ValueError when empty."""
    if not xs:
        raise ValueError("the median of no values is not defined")
    return float(statistics.median(xs))


def abba_order(arms: Sequence[str], round: int) -> tuple[str, ...]:
    """Order of the arms in `round`, counted from 0: forward when even, reversed when odd, so A B B A over two rounds.

    With k arms every pair of arms keeps the same mean position over two rounds, so a linear drift cancels for all.
    """
    return tuple(arms) if round % 2 == 0 else tuple(reversed(arms))


def log_ratios(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """log(a/b) pair by pair, so above 0 means that b took less time. ValueError on unequal lengths or times <= 0."""
    if len(a) != len(b):
        raise ValueError(f"pairs need equally many values, got {len(a)} and {len(b)}")
    if min((*a, *b), default=1.0) <= 0:
        raise ValueError("times must be above 0 to form a ratio")
    return tuple(math.log(x) - math.log(y) for x, y in zip(a, b, strict=True))


def coverage(n: int, *, rank: int) -> float:
    """Probability that the `rank`-th smallest and `rank`-th largest of n values enclose the population median."""
    return float(1 - 2 * sum(math.comb(n, i) for i in range(rank)) / 2**n)


def order_statistic_interval(xs: Sequence[float], *, confidence: float = 0.95) -> Interval | None:
    """Exact interval of the median from two order statistics; None when n is too small for `confidence`.

    The number of values below the median is binomial(n, 1/2) whatever the distribution, so the interval between the
    r-th smallest and r-th largest covers it with probability 1 - 2 P(Bin(n, 1/2) < r); the largest r that keeps
    `confidence` is used. Needs independent values, no normality, no finite variance. At 0.95, n = 5 reaches only
    0.9375 and so has no interval; n = 6 is the least. Source: David & Nagaraja, Order Statistics, 3rd ed., section 7.1;
    Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2. `Interval.confidence` is the one asked for,
    `Interval.method` names the ranks and the coverage reached.
    """
    n = len(xs)
    ranks = [r for r in range(1, n // 2 + 1) if coverage(n, rank=r) >= confidence]
    if not ranks:
        return None
    rank, ordered = ranks[-1], sorted(xs)
    method = f"order statistics {rank} and {n + 1 - rank} of {n}, coverage {coverage(n, rank=rank):.4f}"
    return Interval(
        centre=median(xs), low=ordered[rank - 1], high=ordered[n - rank], confidence=confidence, method=method
    )


def pairs_needed(log_ratios: Sequence[float], *, effect: float) -> int:
    """Estimate of how many pairs shrink the 95 % interval of the median to +-`effect` (log units) at this spread.

    Spread is 1.4826 times the median absolute deviation, so that single outliers do not ask for thousands of pairs.
    At least 6, the smallest number with an exact interval. ValueError when empty or `effect` is not above 0.
    """
    if effect <= 0:
        raise ValueError(f"effect must be above 0, got {effect}")
    centre = median(log_ratios)
    sigma = MAD_TO_SIGMA * median([abs(x - centre) for x in log_ratios])
    z = statistics.NormalDist().inv_cdf(0.975)
    return max(6, math.ceil((z * MEDIAN_PENALTY * sigma / effect) ** 2))
