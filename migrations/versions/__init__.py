"""The steps. Each file is one; its number orders it."""
