"""The executor: interprets a Program with torch."""
