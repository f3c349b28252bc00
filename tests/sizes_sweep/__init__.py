"""Drawn models with open sizes: plans against the definitions, on guarded memory."""
