"""How far apart two values are."""
