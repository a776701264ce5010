"""The side-by-side benchmarks: `python -m bench.overhead`."""
