"""Where `quire loadtest` will live: workload, driver and report over the client. Nothing is here yet."""
