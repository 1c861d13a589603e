"""Reports of commands: text, JSON and JUnit, of Runs, memory and time."""
