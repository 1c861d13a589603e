"""Autograd: what a module computes, keeps and frees."""
