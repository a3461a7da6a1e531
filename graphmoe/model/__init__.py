"""Models in plain PyTorch, independent of compilation and capture."""
