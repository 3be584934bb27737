"""Tools on FX graphs: nodes, operators, provenance, the partitioned graph. They know neither recipe nor FP8 policy."""
