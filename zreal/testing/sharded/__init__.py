"""Laws of sharded training on real ranks: a user's collectives, optimizers, wrapped modules."""
