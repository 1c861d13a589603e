"""The caching allocator of torch, replayed: reserved memory, running out, snapshots."""
