"""A daemon under strain: for long, and beside clients that do their worst. Tests use it too."""
