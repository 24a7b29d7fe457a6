"""A run's directory of checkpoints, on disk: names, manifests, completeness, publishing.

Knows nothing of torch, numpy, models or ranks; whoever calls it decides which rank acts.
"""
