"""Scaled dot-product attention, several ways, behind one function."""
