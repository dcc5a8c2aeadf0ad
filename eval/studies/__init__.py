"""One question a script: `python -m eval.studies.NAME`."""
