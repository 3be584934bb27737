"""The graph passes, one verb_object per file, installed and imported as ``fp8compile.passes``.

A partition pass is a plain function ``(split: PartitionedGraph, ctx: Context) -> Notes``. It edits the forward and backward
graphs in place and returns what it did and what it declined. The tuples that say which passes run, in which order and why,
are in ``fp8compile/compiler/pipeline.py``.
"""
