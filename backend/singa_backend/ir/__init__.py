"""Operator declarations, versioned operators, graphs, and the reader from ModelProto to Graph."""
