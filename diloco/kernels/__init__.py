"""Codecs and outer step in C: source, compiling it here, comparing it with torch. Called through compress."""
