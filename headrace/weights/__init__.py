"""Readers that bring every file format to the one canonical form of a weight."""
