"""Benchmarks and attacks: programs that measure the package or try to break it. Entries of ten lines start them."""
