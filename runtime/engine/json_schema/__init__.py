"""JSON schemas: which are supported, and their equivalent for the grammar library."""
