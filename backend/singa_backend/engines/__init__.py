"""Engines that run models for comparisons: this package and others."""
