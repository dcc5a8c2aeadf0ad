"""Decisions about audited steps, and what a request may claim at its end."""
