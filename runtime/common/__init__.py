"""Errors, types, options, settings and logs, which every layer above uses."""
