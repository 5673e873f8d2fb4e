"""Requests under way in this process: their registry, logged outputs, resumption, send buffers, log lines."""
