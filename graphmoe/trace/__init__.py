"""Tables from Chrome traces of torch's profiler; reading them needs no torch."""
