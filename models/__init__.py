"""Decoder models: configuration, layers, weights. They receive the attention as an argument and know no policy."""
