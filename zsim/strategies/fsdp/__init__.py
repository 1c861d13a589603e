"""Code that FSDP1 and FSDP2 share: hook events, passes, unsharded gradients."""
