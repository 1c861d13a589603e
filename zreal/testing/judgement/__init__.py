"""The judgement of all ranks: who failed first, what is left running, what each has printed."""
