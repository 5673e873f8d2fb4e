"""Embeddings: from texts to encode requests, the encoder's steps, and from values to vectors."""
