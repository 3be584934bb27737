"""What benchmarks of several rooms stand on: timing, peers, rows and their files, tables, plots, batches."""
