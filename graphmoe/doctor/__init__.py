"""Facts of this machine, and checks that prove kernels, graphs and exchanges on it."""
