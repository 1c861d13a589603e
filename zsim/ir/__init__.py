"""Program and Run: the data that everything else is about."""
