"""A peer's durable records (journal, ledger, recorded contributions), and audit and replay of them."""
