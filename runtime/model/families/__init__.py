"""One module per model family: config.json in, a `DecoderSpec` out."""
