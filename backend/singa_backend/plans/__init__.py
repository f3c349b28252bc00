"""Plans: a graph compiled for fixed shapes on one device."""
