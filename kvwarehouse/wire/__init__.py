"""The wire contract: generated code, conversions, limits, error codes. Sole importer of wire.generated."""
