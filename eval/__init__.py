"""Measurement of quality and cost: `python -m eval.NAME`. Not part of the wheel."""
