"""Training loops of other libraries, on planned models."""
