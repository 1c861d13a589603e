"""Commands on constants: held against measurements, fitted to them, measured here."""
