"""Range analysis: what is proven of every value of a graph, whatever its finite inputs are."""

from fp8compile.analysis.ranges.analysis import ranges
from fp8compile.analysis.ranges.interval import Range

__all__ = ["Range", "ranges"]
