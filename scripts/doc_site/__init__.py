"""Builds the documents as a site: `make docs`. build.py is the program and has the navigation,
reference.py and error_codes.py make pages of the code, conf.py has Sphinx's settings."""
