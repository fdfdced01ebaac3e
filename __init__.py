"""weft."""
