"""For how long processes that tests start may hang."""

# Seconds. It only ends what would hang for ever: on a machine that does much besides, imports alone may take a minute.
HANGS = 600
