"""Unmodified architectures of `transformers`, made tiny: `architectures` lists them, `tiny` builds
them from their configurations."""
