"""Generated models of one operator each, judged by independent witnesses, and a ledger of known differences."""
