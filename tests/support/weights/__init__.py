"""Layouts, recipes and loaders of models, and the ranks of a weight update."""
