"""What every evaluation shares: selection, run folder, records, resume, the conformance check before a measurement, provenance."""
