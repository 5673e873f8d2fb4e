"""One module per model family, which reads its config.json or GGUF metadata into a `DecoderSpec`."""
