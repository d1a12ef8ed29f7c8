"""SGLang as an engine. `plugin/` runs inside SGLang's own processes and imports nothing of the project but pure modules;
`verbs` is how the agent talks to it.
"""
