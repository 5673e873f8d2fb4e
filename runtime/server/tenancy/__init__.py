"""Tenants: their keys and limits, and the bytes that the server holds for each."""
