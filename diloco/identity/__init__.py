"""Who is who: the run's secret, keys and certificates."""
