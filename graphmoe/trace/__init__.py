"""What ``graphmoe.trace`` makes of a Chrome trace of torch's profiler: no torch is needed to read one."""
