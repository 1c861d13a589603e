"""Changes that hide exposed communication: the candidates, and the search for the smallest."""
