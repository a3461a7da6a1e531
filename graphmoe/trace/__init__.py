"""Tables from a Chrome trace of torch's profiler: no torch is needed to read one."""
