"""Model folders, and how models run on a device."""
