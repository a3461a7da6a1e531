"""Effects of `host.*` on the processes of a run, docs/launch.md; files, logs and signals of any process."""
