"""Other libraries' training loops on planned models."""
