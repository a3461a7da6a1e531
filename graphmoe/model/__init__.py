"""The models, in plain PyTorch. They know nothing of compilation or capture, and of ranks the layout."""
