"""Batches: files of requests, one JSON line each, answered in the order of their lines."""
