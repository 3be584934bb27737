"""What is run by itself and is no ``Benchmark``: questions on quality, bytes and compile time, nearly all on a CPU."""
