"""What `graphmoe.bench` measures, and how it takes time and memory."""
