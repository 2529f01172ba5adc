"""What every benchmark goes through: the gate, the timing, the records and their provenance."""
