"""Array namespaces, and the devices on which arrays are stored."""
