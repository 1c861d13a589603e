"""The side of a test that runs on a rank: its session, its fixture, checks of its collectives."""
