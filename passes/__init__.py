"""Rewrites of traced graphs, one file each; `table.py` lists them."""
