"""What only a GPU can show: skipped, with the reason, where there is none. ``bash benchmarks/gpu.sh tests`` runs it."""
