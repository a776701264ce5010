"""Side-by-side benchmarks: `python -m bench.overhead`."""
