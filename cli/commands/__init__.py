"""The verbs of the `vertumnus` command, one module each. Each imports what is heavy inside its function: help stays quick."""
