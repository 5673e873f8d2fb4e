"""The `quire` command, one file per subcommand."""
