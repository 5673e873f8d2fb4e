"""Embeddings: texts to encode requests, encode steps, values to vectors."""
