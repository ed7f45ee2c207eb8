"""The options of every group, as YAML files that override defaults; keys.py says what a key is."""
