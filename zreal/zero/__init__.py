"""ZeRO for a user's own module and training loop. It must know no schedule: the Program of zero1,
zero2 or zero3 says what is gathered, reduced and freed, and when."""
