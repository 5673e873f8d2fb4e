"""TCP and unix sockets below every protocol: addresses, listening, TLS, accepting, heads of HTTP requests."""
