"""Tenants: their keys, their names in use, the bytes that the server keeps for each."""
