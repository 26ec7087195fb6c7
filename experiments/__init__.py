"""Data, training runs, benchmarks and notebooks. Nothing else in the repository imports this package."""
