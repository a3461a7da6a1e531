"""Compile units: traced, rewritten by passes, compiled, cached."""
