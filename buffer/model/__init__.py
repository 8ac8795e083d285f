"""Ids, jobs, limits, manifests, order policies and other values that all rooms share."""
