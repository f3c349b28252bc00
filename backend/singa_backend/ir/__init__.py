"""Operators as they are declared, and models as they are read: declarations, versioned operators, graphs."""
