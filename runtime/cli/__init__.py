"""What each `quire` command does, behind the flags that `cli.py` parses."""
