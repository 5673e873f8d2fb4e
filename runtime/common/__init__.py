"""Errors, types, configuration, settings and logs: what every layer above uses."""
