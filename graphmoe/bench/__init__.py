"""Benchmark suites of `graphmoe.bench`, and how they measure time and memory."""
