"""Contract and site: every key, its bounds, model presets, loading, errors that name the right one."""
