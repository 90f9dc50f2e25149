"""Scripts as people write them, each for one device and as changed for several."""
