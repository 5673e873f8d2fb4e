"""One module per model family, which reads its config.json into a `DecoderSpec`."""
