"""From a checkpoint to weights on a device, for target, draft model, MTP and EAGLE-3."""
