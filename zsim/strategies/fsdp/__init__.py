"""What FSDP1 and FSDP2 share."""
