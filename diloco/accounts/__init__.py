"""What each peer wrote down for ever (journal, ledger, recorded contributions), and audit and replay of it."""
