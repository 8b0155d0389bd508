"""Compiled loops: `scalar` is all arithmetic, `cpu` the loops over arrays, `rules` what a format comes to."""
