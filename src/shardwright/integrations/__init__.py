"""Adapters that train planned models with the training loops of other libraries."""
