"""Events of a run: the history read from them, report, live screen."""
