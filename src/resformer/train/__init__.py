"""Training: configuration, schedule, optimizer, checkpoints, loop, export. Import from the modules."""
