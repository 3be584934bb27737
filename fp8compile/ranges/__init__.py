"""Range analysis: what is proven of every value of a graph, whatever its finite inputs are."""

from fp8compile.ranges.analysis import ranges
from fp8compile.ranges.interval import Range

__all__ = ["Range", "ranges"]
