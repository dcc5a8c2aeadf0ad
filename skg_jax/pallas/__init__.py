"""Hopper kernels in Pallas / Mosaic GPU. Arrays in, arrays out; no policy. Each has an XLA twin where it is called."""
