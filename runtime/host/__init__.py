"""What `host.*` does to the processes of a run, docs/launch.md."""
