"""The child side: the only folder that imports torch."""
