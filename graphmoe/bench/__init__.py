"""Suites of `graphmoe.bench`, and their measures of time and memory."""
