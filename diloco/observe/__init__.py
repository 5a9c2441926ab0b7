"""What happened: events, the history read from them, report, live screen."""
