"""A daemon checked against dictionaries by random rules: see base.py."""
