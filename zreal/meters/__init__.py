"""Measures bytes, collectives and time of a real step. It must not know what a strategy or Program
does, so that its figures are independent of what zsim predicts."""
