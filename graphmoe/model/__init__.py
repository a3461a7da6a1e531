"""Models in plain PyTorch, independent of compilation and capture. The layout is all they know of ranks."""
