"""The training loop, its step, and the watch over both."""
