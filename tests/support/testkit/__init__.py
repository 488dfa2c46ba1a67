"""What tests of several kinds share: models, hostile input, damage, counts of faults."""
