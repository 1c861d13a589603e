"""Runs torch's own strategies and records them, to prove that our Programs are what torch does. It
must know no Program: a subject issues, holds and frees as torch decides."""
