"""Placement rules of other systems, by their published definitions and defaults, to compare ours with.

`rule.py` says what a rule is asked and told, `placing.py` puts one in the place of the router's own. Every rule names its
source. A rule sees what its own system would see: counts, blocks, an index; none sees our cost model.
"""
