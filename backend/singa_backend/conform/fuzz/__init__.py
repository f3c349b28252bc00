"""Generated models of one operator each, judged by witnesses that share no code with it, and a ledger of what differs."""
