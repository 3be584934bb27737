"""The zoo: many small models through fp8compile, each beside a BF16 twin; ``docs/zoo.md`` is made of the results."""
