"""Models in plain PyTorch, independent of compilation and capture; of ranks they know only the layout."""
