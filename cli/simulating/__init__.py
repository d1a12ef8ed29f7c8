"""`vertumnus simulate` and `what-if`: what is asked for, and how the answers look."""
