"""The processes of a run: torch elastic, the nodes of a Slurm job, how errors come back; docs/launch.md."""
