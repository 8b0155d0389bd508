"""Compiled loops: `scalar` holds all arithmetic, `cpu` the loops over arrays, `rules` what a format comes to."""
