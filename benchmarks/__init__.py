"""Measurements that the documentation publishes, each beside its peers in the same run."""
