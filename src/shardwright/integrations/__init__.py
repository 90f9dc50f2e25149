"""Training loops of other libraries for planned models."""
