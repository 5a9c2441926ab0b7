"""Identity of peers: the run's secret, keys and certificates."""
