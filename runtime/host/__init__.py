"""Process set-up by `host.*` (docs/launch.md); files, logs and signals."""
