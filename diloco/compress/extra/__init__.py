"""Codecs that others beat in the table of `scripts/bench-codecs`: loaded only where a contract names one."""
