"""Page-sparse long-context decoding with an audited, per-request bound on the attention left out."""
