"""Files of measurements: tables, records, and the models that rows are about."""
