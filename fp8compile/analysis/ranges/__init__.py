"""Range analysis: what is proven of every value of a graph, whatever its finite inputs are."""

from fp8compile.analysis.ranges.analysis import ranges
from fp8compile.analysis.ranges.interval import Interval

__all__ = ["Interval", "ranges"]
