"""The parallelizer: from a model to a plan, and from a plan to a model that runs as planned."""
