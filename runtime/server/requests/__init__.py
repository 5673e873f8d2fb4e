"""Live requests of this process: their registry, logged outputs, resumption, send buffers, log lines."""
